"""The examination of a run's programs, which gives a report."""

from __future__ import annotations

import importlib.metadata
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from xlatrain.host.waiting import told
from xlatrain.preflight.estimate import estimate
from xlatrain.preflight.hlo import Collective
from xlatrain.preflight.program import CompiledStep, Step, compile_step
from xlatrain.preflight.report import ArrayBytes, Report, StepReport
from xlatrain.preflight.topology import Topology
from xlatrain.step.device_memory import size
from xlatrain.step.offload import MEMORY as HOST_MEMORY
from xlatrain.step.state import TrainState

_WORTH_TELLING = 0.05  # of what the state takes
_PACKAGES = ("xlatrain", "torch", "jax", "jaxlib", "libtpu")


def examine(
    steps: Sequence[Step],
    *,
    topology: Topology,
    mesh: Mesh,
    state: TrainState,
    batch: Sequence[Any],
    trainable: Iterable[str],
    accumulate: int = 1,
    loops: Sequence[str] = (),
    attention: Sequence[str] = (),
    notes: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    store: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compile every program and put together what that told.

    Args:
        steps: the programs; ``"accumulate"`` runs ``accumulate - 1`` times in an optimizer step, ``"validation"`` never.
        mesh: over ``topology.devices()``.
        state: by parameter path; arrays are ``jax.ShapeDtypeStruct`` with shardings.
        batch: the arrays of one batch.
        trainable: the paths of the parameters that have gradients.
        accumulate: batches of one optimizer step.
        store: a folder to keep each program's StableHLO in.
        progress: told what is compiled, and that it goes on. It is called from a thread too, while the compiler has taken file
            descriptor 2.

    Raises:
        Exception: what JAX or XLA raise where a program is wrong; not fitting into memory is no error.
    """
    start = time.perf_counter()
    arrays = _Arrays(topology, mesh, state, batch, set(trainable))
    compiled: list[CompiledStep] = []
    for step in steps:
        progress(f"compiling the {step.name} program for {topology.title}")
        with told(f"compiling the {step.name} program", progress):
            compiled.append(compile_step(step, mesh, store))
    runs = [(one, {"accumulate": accumulate - 1, "validation": 0}.get(one.name, 1)) for one in compiled]
    reports = [_step(one, times, arrays, topology) for one, times in runs]
    worst = max(reports, key=lambda one: (one.refused is not None, one.bytes_per_chip["total"]))
    fits = all(one.refused is None for one in reports) and worst.bytes_per_chip["total"] <= worst.bytes_per_chip["hbm"]
    training = [(one, times) for one, times in runs if times]
    rows = max((leaf.shape[0] for leaf in batch if leaf.shape), default=None)
    names = ("trace", "lower", "compile")
    seconds = {name: round(sum(one.seconds[name] for one in compiled), 3) for name in names}
    return Report(
        fits=fits,
        topology=topology.name,
        num_slices=topology.num_slices,
        chips=topology.chips,
        mesh=dict(mesh.shape),
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)),
        bytes_per_chip=worst.bytes_per_chip,
        collectives=summed((collective, times) for one, times in training for collective in one.collectives),
        flops_per_step=sum(one.flops.total * times for one, times in training),
        estimate=estimate(training, topology, mesh.devices.flat[0], None if rows is None else rows * accumulate)
        if fits
        else None,
        seconds={**seconds, "total": round(time.perf_counter() - start, 3)},
        missing=0 if fits else max(worst.bytes_per_chip["total"] - worst.bytes_per_chip["hbm"], 1),
        contributors=[] if fits else arrays.contributors(worst.bytes_per_chip),
        changes=[],
        largest=arrays.largest(),
        replicated_bytes=arrays.replicated_bytes(),
        steps=reports,
        loops=list(loops),
        attention=list(attention),
        notes=list(notes),
        settings=dict(settings or {}),
        peak_memory=_peak_memory(),
        versions=versions(),
    )


def first_estimate(
    topology: Topology, mesh: Mesh, state: TrainState, batch: Sequence[Any], trainable: Iterable[str], accumulate: int = 1
) -> Iterator[str]:
    """Lines about what is known before anything is captured: what the state takes on a chip, and what of it no axis divides.

    Arguments are as for :func:`examine`.
    """
    return _Arrays(topology, mesh, state, batch, set(trainable)).first_estimate(accumulate)


class _Arrays:
    """The arrays that a step is called with, and what they take on a chip."""

    def __init__(self, topology: Topology, mesh: Mesh, state: TrainState, batch: Sequence[Any], trainable: set[str]) -> None:
        self._each = topology.devices_per_chip
        self._mesh = mesh
        self._devices = mesh.devices.size
        self.hbm = 0 if topology.chip is None else topology.chip.hbm
        params = {_path(key): leaf for key, leaf in state.params.items()}
        optimizer = {
            f"optimizer: {_dotted(path)}": leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
            if getattr(leaf.sharding, "memory_kind", None) != HOST_MEMORY  # host memory takes nothing of a chip
        }
        accumulated = {f"accumulated gradient: {_path(key)}": leaf for key, leaf in state.accumulated.items()}
        buffers = {f"buffer: {_path(key)}": leaf for key, leaf in state.buffers.items()}
        gradients = {f"gradient: {name}": leaf for name, leaf in params.items() if name in trainable}
        inputs = {f"batch: array {index}": leaf for index, leaf in enumerate(batch)}
        self._gradients = gradients
        self._named = {**params, **optimizer, **accumulated, **buffers}
        self._batch = inputs
        self.parts = {
            "parameters": self._sum({**params, **buffers}),
            "gradients": self._sum(accumulated),
            "optimizer": self._sum(optimizer),
            "batch": self._sum(inputs),
        }
        self.gradient_bytes = self._sum(gradients)

    def _bytes(self, leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(tuple(leaf.shape))
        return math.prod(shape) * np.dtype(leaf.dtype).itemsize * self._each

    def _sum(self, leaves: Mapping[str, Any]) -> int:
        return sum(self._bytes(leaf) for leaf in leaves.values())

    def _replicas(self, leaf: Any) -> int:
        if leaf.sharding is None:
            return 1
        parts = math.prod(leaf.shape) // max(math.prod(leaf.sharding.shard_shape(tuple(leaf.shape))), 1)
        return self._devices // max(parts, 1)

    def largest(self, count: int = 20) -> list[ArrayBytes]:
        described = [
            ArrayBytes(
                name,
                tuple(leaf.shape),
                str(np.dtype(leaf.dtype)),
                str(getattr(leaf.sharding, "spec", "PartitionSpec()")),
                self._replicas(leaf),
                self._bytes(leaf),
            )
            for name, leaf in self._named.items()
        ]
        return sorted(described, key=lambda one: -one.bytes_per_chip)[:count]

    def replicated_bytes(self) -> int:
        return sum(self._bytes(leaf) for leaf in self._named.values() if self._replicas(leaf) == self._devices > 1)

    def first_estimate(self, accumulate: int) -> Iterator[str]:
        """Bytes of the state on a chip, and the largest arrays that no axis divides."""
        kept = self.gradient_bytes if accumulate > 1 else 0
        parts = {**self.parts, "gradients": kept + self.gradient_bytes}
        total = sum(parts.values())
        listed = ", ".join(f"{name} {size(parts[name])}" for name in parts)
        room = f" of {size(self.hbm)}" if self.hbm else ""
        verdict = "; this does not fit" if 0 < self.hbm < total - self.gradient_bytes else "; activations come on top"
        yield f"first estimate per chip: {size(total)}{room} ({listed}){verdict}"
        whole = [one for one in self.largest() if one.replicas == self._devices > 1]
        split = any(count > 1 for axis, count in self._mesh.shape.items() if axis != "data")
        if whole and split and self.replicated_bytes() > _WORTH_TELLING * total:
            named = ", ".join(f"{one.path} {list(one.shape)}" for one in whole[:3])
            yield f"whole on each of {self._devices} devices: {size(self.replicated_bytes())}, the largest {named}"

    def contributors(self, parts: Mapping[str, int]) -> list[dict[str, Any]]:
        """The five largest: single arrays, and what the compiler needs besides them."""
        single = {one.path: one.bytes_per_chip for one in self.largest()}
        everything = {
            **single,
            "gradients (all)": parts["gradients"],
            "activations and temporaries": parts["temporaries"],
            "optimizer state (all)": parts["optimizer"],
            "parameters (all)": parts["parameters"],
            "batch": parts["batch"],
        }
        ranked = sorted(everything.items(), key=lambda item: -item[1])[:5]
        return [{"what": name, "bytes_per_chip": size} for name, size in ranked]


def _step(one: CompiledStep, times: int, arrays: _Arrays, topology: Topology) -> StepReport:
    """Split what the compiler allots. Gradients live among its temporaries: as far as they can all be there at once, they are
    named; what is left are activations, gathered parameters and scratch."""
    training = one.name != "validation"
    parts = dict(arrays.parts)
    if not training:
        parts["optimizer"] = parts["gradients"] = 0
    total = one.needed * topology.devices_per_chip
    if one.memory is None and "temporaries" in (one.refused or ""):
        total = max(total, sum(parts.values()))
    rest = max(total - sum(parts.values()), 0)
    if training:
        gradients = min(arrays.gradient_bytes, rest)
        parts["gradients"] += gradients
        rest -= gradients
    hbm = arrays.hbm or total
    if one.available:
        hbm = min(hbm, one.available * topology.devices_per_chip)
    host = 0 if one.memory is None else one.memory.host * topology.devices_per_chip
    sizes = {**parts, "temporaries": rest, "total": total, "hbm": hbm, "host": host}
    collectives = summed((collective, 1) for collective in one.collectives)
    seconds = {name: round(value, 3) for name, value in one.seconds.items()}
    return StepReport(one.name, times, sizes, one.refused, collectives, one.flops.total, one.cycles, seconds, one.stored)


def summed(collectives: Iterable[tuple[Collective, int]]) -> dict[str, dict[str, dict[str, int]]]:
    """Mesh axis → kind → count and bytes of collectives, and how many of the bytes nothing goes on beside.

    Args:
        collectives: each with how often its program runs.
    """
    found: dict[str, dict[str, dict[str, int]]] = {}
    for one, times in collectives:
        entry = found.setdefault("+".join(one.axes), {}).setdefault(one.kind, {"count": 0, "bytes": 0, "synchronous_bytes": 0})
        entry["count"] += one.count * times
        entry["bytes"] += one.bytes * one.count * times
        entry["synchronous_bytes"] += 0 if one.asynchronous else one.bytes * one.count * times
    return found


def _path(key: Any) -> str:
    paths = getattr(key, "paths", None)
    return str(key) if paths is None else f"{paths[0]} … {paths[-1]} ({len(paths)} stacked)"


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)


def _peak_memory() -> int:
    """Bytes. Linux carries ``ru_maxrss`` from the process that started this one through ``exec``; ``VmHWM`` is this one's own."""
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """The installed versions of the packages that compile, by package name."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
