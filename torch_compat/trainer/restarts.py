"""A run that is started again continues by itself, without a change of the script: ``fit(model)`` finds what it saved before.

Whoever starts a run again (``xlatrain launch --max-restarts``, ``tpu_scripts/supervise.sh``, a JobSet, a requeued SLURM job) sets
``XLATRAIN_RESUME_SINCE`` to the time of the first start, the same at every start: it names the run. Each ``fit`` then notes its
checkpoints in ``default_root_dir``, by its number in the process: the second ``fit`` of a script continues from its own.
``fit(ckpt_path=…)`` is obeyed as it stands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_compat.utilities.rank_zero import rank_zero_info
from xlatrain.checkpoint import saved_facts
from xlatrain.checkpoint.snapshots import newest_snapshot
from xlatrain.cluster.keepers import NeighbourMemory
from xlatrain.cluster.launch import RESUME_SINCE

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

_fits = 0


def newest(trainer: Trainer, commit_time_ns: Callable[[str], int | None]) -> str | None:
    """Called by every ``fit`` that was given no checkpoint: the newest one of earlier starts of this run; process 0 decides.

    Args:
        trainer: about to fit.
        commit_time_ns: when a checkpoint was committed; None where it is gone, or was never completed.

    Raises:
        ValueError: the variable is no number.
    """
    global _fits
    record = _record(trainer)
    if record is None:
        return None
    _fits += 1
    trainer._fit_number = _fits
    found: dict[str, int] = {}
    for entry in _entries(record) if trainer.is_global_zero else ():
        if entry["fit"] == _fits and (time := commit_time_ns(entry["path"])) is not None:
            found[entry["path"]] = time
    stored = max(found, key=lambda one: found[one]) if found else None
    path, said = trainer.strategy.broadcast(_newer_in_memory(stored) if trainer.is_global_zero else (None, ""))
    if path is not None:
        rank_zero_info(f"{RESUME_SINCE} is set: continuing from {path}, {said}")
    return path


def _newer_in_memory(stored: str | None) -> tuple[str | None, str]:
    """The newest snapshot in the hosts' memory, unless what is stored is newer; and what it is.

    They may be of one step, and either is right then: a validation or an epoch's end that the snapshot is before is run again.
    """
    memory = NeighbourMemory.of_environment()
    snapshot = None if memory is None else newest_snapshot(memory, _fits)
    step = None if stored is None else (saved_facts(stored) or {}).get("step")
    if snapshot is None or (isinstance(step, int) and step > snapshot[1]):
        return stored, "the newest checkpoint that this run has saved"
    return snapshot[0], f"which is in the hosts' memory, of step {snapshot[1]}: no storage is read"


def note(trainer: Trainer, path: str | os.PathLike[str]) -> None:
    """A full checkpoint is being saved there."""
    record = _record(trainer)
    if record is None or trainer._fit_number == 0 or not trainer.is_global_zero:
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    absolute = os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)
    with record.open("a") as file:
        file.write(json.dumps({"fit": trainer._fit_number, "path": absolute}) + "\n")


def _record(trainer: Trainer) -> Path | None:
    since = os.environ.get(RESUME_SINCE)
    if not since or trainer.fast_dev_run:
        return None
    if not since.isdecimal():
        raise ValueError(f"{RESUME_SINCE} must be a time in seconds since 1970, without fraction, not {since!r}")
    if "://" in trainer.default_root_dir:
        raise ValueError(
            f"{RESUME_SINCE} is set, but checkpoints cannot be noted in default_root_dir={trainer.default_root_dir!r}; use a "
            "folder that outlives the machine (a mounted bucket), or unset it and pass fit(ckpt_path=…)"
        )
    return Path(trainer.default_root_dir) / f".xlatrain-run-{since}.jsonl"


def _entries(record: Path) -> Iterator[dict[str, Any]]:
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:  # the process was killed while it wrote
            continue
