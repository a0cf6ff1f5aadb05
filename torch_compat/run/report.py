"""The run report: what really ran, as JSON in the file that ``XLATRAIN_REPORT`` names (docs/lightning_compat.md)."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

_PACKAGES = ("xlatrain", "torch", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")
_CAPTURE = "cannot be captured: "
_runs: list[dict[str, Any]] = []


@dataclass
class ExecutorLog:
    """The record of an executor in one run.

    Attributes:
        variants: programs of the run.
        taken: those of them that an earlier run of the module had compiled.
        captures: graphs made of steps.
        seconds: spent capturing and compiling.
        steps: training batches run.
        loops: "layers × ops" of each stretch of the programs that repeats; it runs as a loop unless a reason follows.
        attention: of each kind of attention op in training how many there are, which kernel computes it, and why.
        losses: over so large a vocabulary that their logits are never whole.
        fallback: why steps run eagerly, where compiled ones were wanted.
        on_host: methods of evaluation, or the first steps, that run eagerly beside compiled training, and why.
        recompilations: what changed for each program after a step's first.
        buckets: of steps whose batches have many sizes, the sizes that one program serves, or why each has its own.
        repeated: steps that ran once more, by another program, since a value for which their Python asks was not as assumed.
    """

    variants: int = 0
    taken: int = 0
    captures: int = 0
    seconds: float = 0.0
    steps: int = 0
    loops: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    fallback: str | None = None
    on_host: dict[str, str] = field(default_factory=dict)
    recompilations: list[str] = field(default_factory=list)
    buckets: list[str] = field(default_factory=list)
    repeated: int = 0

    @property
    def short_reason(self) -> str:
        """The reason of a fallback as one short line: where and why, without examples and the fix."""
        first, *others = [line.strip() for line in (self.fallback or "").splitlines()] or [""]
        why = [line.removeprefix(_CAPTURE).partition(" (")[0].rstrip(".") for line in others[:1] if line.startswith(_CAPTURE)]
        return ": ".join([first, *why])

    def how(self, executor: str) -> str:
        """How steps run, in a word or two."""
        return f"{executor}, {' and '.join(self.on_host)} eager on the host" if self.on_host else executor

    def run(self, stage: str, executor: str, mesh: Mesh, precision: str) -> dict[str, Any]:
        """The run's entry in the report; its executor is "none" where an exception ended it before a step was compiled."""
        return {
            "stage": stage,
            "executor": "none" if executor == "compiled" and not self.variants and sys.exc_info()[0] else executor,
            "mesh_size": mesh.devices.size,
            "mesh": dict(mesh.shape),
            "processes": jax.process_count(),
            "platform": mesh.devices.flat[0].platform,
            "precision": precision,
            "variants": self.variants,
            "taken": self.taken,
            "captures": self.captures,
            "loops": self.loops,
            "attention": self.attention,
            "losses": self.losses,
            "recompilations": self.recompilations,
            "buckets": self.buckets,
            "repeated": self.repeated,
            "fallback": self.fallback,
            "on_host": self.on_host,
            "compile_s": round(self.seconds, 3),
            "steps": self.steps,
        }


def add_run(run: dict[str, Any]) -> None:
    """Add one run and write the report of all runs of this process so far, where it was asked for."""
    if os.environ.get("XLATRAIN_REPORT"):
        _runs.append(run)
        write()


def check_path() -> None:
    """Find out before a run whether its report can be written; on process 0.

    Raises:
        OSError: it cannot; names ``XLATRAIN_REPORT``.
    """
    path = os.environ.get("XLATRAIN_REPORT")
    if not path or jax.process_index() != 0:
        return
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a directory")
        if not os.access(target.parent, os.W_OK):
            raise PermissionError(f"{target.parent} is not writable")
    except OSError as error:
        raise type(error)(f"XLATRAIN_REPORT={path!r}: the run report cannot be written ({error}); expected a file") from error


def write() -> None:
    """Write the report again, on process 0: a run that is still going on was changed in place."""
    path = os.environ.get("XLATRAIN_REPORT")
    if not path or jax.process_index() != 0:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"runs": _runs, "versions": dict(versions())}, indent=1))
    temporary.replace(target)


@functools.cache
def versions() -> Mapping[str, str]:
    """The installed versions of the packages that numbers depend on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return MappingProxyType(found)
