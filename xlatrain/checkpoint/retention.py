"""Retention: which checkpoints of a directory to keep, and the removal of the others."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from xlatrain.checkpoint import filesystem
from xlatrain.checkpoint.directory import remove
from xlatrain.checkpoint.errors import CheckpointError
from xlatrain.checkpoint.file_record import FileRecord
from xlatrain.checkpoint.reading import Checkpoint
from xlatrain.checkpoint.record import committed_in


@dataclasses.dataclass(frozen=True)
class Retention:
    """A retention policy: keeps everything that any of its rules keeps, and always the newest complete checkpoint.

    Attributes:
        last: the newest so many.
        best: the so many with the best value of ``monitor``; checkpoints without that metric, or with NaN, are not among them.
        monitor: name of the metric, in the facts that a checkpoint was saved with.
        mode: ``"min"`` or ``"max"``: which value is better.
        every_n_steps: those whose step is a multiple.
        younger_than_s: those committed within so many seconds.

    Raises:
        ValueError: no rule, a number below its minimum, ``best`` without ``monitor``, another ``mode``.
    """

    last: int | None = None
    best: int | None = None
    monitor: str | None = None
    mode: str = "min"
    every_n_steps: int | None = None
    younger_than_s: float | None = None

    def __post_init__(self) -> None:
        rules = {"last": self.last, "best": self.best, "every_n_steps": self.every_n_steps, "younger_than_s": self.younger_than_s}
        if all(value is None for value in rules.values()):
            raise ValueError(f"Retention() has no rule, and would keep one checkpoint only; give one of {', '.join(rules)}")
        for name, value in rules.items():
            if value is not None and value < (1 if name != "younger_than_s" else 0):
                raise ValueError(f"Retention({name}={value}): expected {'0' if name == 'younger_than_s' else '1'} or more")
        if (self.best is None) != (self.monitor is None):
            raise ValueError(f"Retention(best={self.best}, monitor={self.monitor!r}): give both or neither")
        if self.mode not in ("min", "max"):
            raise ValueError(f"Retention(mode={self.mode!r}): expected 'min' or 'max'")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A checkpoint of a directory.

    Attributes:
        path: its directory, or file.
        committed_ns: see :attr:`Checkpoint.committed_ns`.
        facts: what it was saved with; None where it is damaged.
        size_bytes: of its files; None where it is damaged.
        problem: why it cannot be opened; empty for a complete one.
    """

    path: epath.Path
    committed_ns: int
    facts: dict[str, Any] | None
    size_bytes: int | None
    problem: str = ""


def entries(directory: str | os.PathLike[str]) -> list[Entry]:
    """Every checkpoint directly in a directory, the newest first; links, and saves that were never committed, are left out."""
    found = []
    for path, record in committed_in(filesystem.as_path(directory)):
        if filesystem.is_link(path):
            continue
        if isinstance(record, FileRecord):
            found.append(Entry(path, record.committed_ns, dict(record.facts), path.stat().length))
            continue
        try:
            opened = Checkpoint(path)
        except (CheckpointError, OSError) as error:
            found.append(Entry(path, record.committed_ns, None, None, str(error)))
        else:
            found.append(Entry(path, record.committed_ns, dict(opened.facts), opened.size_bytes))
    return sorted(found, key=lambda entry: (entry.committed_ns, entry.path.name), reverse=True)


def kept(found: Sequence[Entry], policy: Retention, now_ns: int | None = None) -> dict[epath.Path, str]:
    """The checkpoints of ``found`` (newest first) that a policy keeps → by which rule. Damaged ones count for nothing. Pure."""
    complete = [entry for entry in found if not entry.problem]
    reasons: dict[epath.Path, str] = {entry.path: "newest" for entry in complete[:1]}
    for entry in complete[: policy.last or 0]:
        reasons.setdefault(entry.path, "last")
    sign = 1 if policy.mode == "min" else -1
    scores = {entry.path: sign * _metric(entry, policy.monitor) for entry in complete}
    scored = [entry for entry in complete if not math.isnan(scores[entry.path])]
    for entry in sorted(scored, key=lambda entry: scores[entry.path])[: policy.best or 0]:
        reasons.setdefault(entry.path, f"best {policy.monitor}")
    now_ns = time.time_ns() if now_ns is None else now_ns
    for entry in complete:
        step = (entry.facts or {}).get("step")
        if policy.every_n_steps and isinstance(step, int) and step % policy.every_n_steps == 0:
            reasons.setdefault(entry.path, f"step {step}")
        if policy.younger_than_s is not None and now_ns - entry.committed_ns <= policy.younger_than_s * 1e9:
            reasons.setdefault(entry.path, "young")
    return reasons


def _metric(entry: Entry, name: str | None) -> float:
    """NaN where there is none."""
    metrics = (entry.facts or {}).get("metrics")
    value = metrics.get(name) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) and abs(value) < 1 << 1000 else math.nan


def prune(
    directory: str | os.PathLike[str],
    policy: Retention,
    *,
    among: Collection[str | os.PathLike[str]] | None = None,
    protected: Collection[str | os.PathLike[str]] = (),
    dry_run: bool = False,
) -> list[Path | epath.Path]:
    """Remove the complete checkpoints of a directory that a policy does not keep; not collective: process 0 calls it.

    ::

        prune("checkpoints", Retention(last=3, every_n_steps=1000))

    What is damaged is left for its owner to look at. What a symbolic link of the directory leads to (``last.ckpt``) is kept.

    Args:
        directory: the directory in which the checkpoints are.
        policy: what to keep.
        among: only these are counted and removed, e.g. what one run saved; default: all that are there.
        protected: these stay whatever the policy says.
        dry_run: remove nothing.

    Returns:
        What was, or with ``dry_run`` would be, removed; the oldest first.
    """
    found = entries(directory)
    if among is not None:
        own = {filesystem.as_path(path) for path in among}
        found = [entry for entry in found if entry.path in own]
    keep = set(kept(found, policy)) | _linked(filesystem.as_path(directory)) | {filesystem.as_path(path) for path in protected}
    doomed = [entry.path for entry in reversed(found) if not entry.problem and entry.path not in keep]
    for path in () if dry_run else doomed:
        remove(path)
    return [filesystem.local(path) for path in doomed]


def _linked(directory: epath.Path) -> set[epath.Path]:
    links = [entry for entry in directory.iterdir() if filesystem.is_link(entry)] if directory.is_dir() else []
    return {filesystem.as_path(os.path.join(directory, os.readlink(link))) for link in links}
