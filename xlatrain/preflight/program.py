"""Compiling one program for devices that are not here."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from xlatrain.preflight import flops, libtpu
from xlatrain.preflight.flops import Flops
from xlatrain.preflight.hlo import Collective, Hlo

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Step:
    """A program and what it is called with.

    Attributes:
        name: ``"train"``, ``"accumulate"``, ``"validation"``, …
        program: a jitted function.
        args: its arguments; arrays are ``jax.ShapeDtypeStruct`` with a sharding, or numpy arrays.
    """

    name: str
    program: Any
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments, outputs: of the program, with the padding of the chip's layouts.
        aliased: outputs that take the place of donated arguments.
        temporaries: everything else at the peak.
        code: the program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class CompiledStep:
    """What compiling a step told.

    Attributes:
        name: of the step.
        memory: where it fits, else None.
        refused: the compiler's words where it does not fit.
        needed: bytes per device that the compiler asked for.
        available: bytes per device that the compiler found too few; None where it fits.
        collectives: empty where it does not fit.
        flops: on all devices.
        bytes_accessed: of memory on one device, as XLA counts (a loop's body once).
        cycles: the compiler's estimate, relative only.
        seconds: of trace, lower and compile.
        out: shapes of what it returns.
    """

    name: str
    memory: Memory | None
    refused: str | None
    needed: int
    available: int | None
    collectives: tuple[Collective, ...]
    flops: Flops
    bytes_accessed: float
    cycles: int
    seconds: dict[str, float]
    out: Any


def compile_step(step: Step, mesh: Mesh) -> CompiledStep:
    """Trace, lower and compile a step for the devices of its mesh.

    Raises:
        Exception: what JAX or XLA raise where the program is wrong; not fitting into memory is no error.
    """
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    traced = step.program.trace(*step.args)
    seconds["trace"] = time.perf_counter() - start
    counted = flops.count(traced.jaxpr)
    start = time.perf_counter()
    lowered = traced.lower()
    seconds["lower"] = time.perf_counter() - start
    start = time.perf_counter()
    try:
        with libtpu.quiet_stderr(), libtpu.nothing_kept():
            compiled = lowered.compile()
    except Exception as error:
        found = _out_of_memory(str(error))
        if found is None:
            raise
        seconds["compile"] = time.perf_counter() - start
        return CompiledStep(step.name, None, found[0], found[1], found[2], (), counted, 0.0, 0, seconds, lowered.out_info)
    seconds["compile"] = time.perf_counter() - start
    memory = memory_of(compiled)
    hlo = Hlo(compiled.as_text(), mesh)
    accessed = float((compiled.cost_analysis() or {}).get("bytes accessed", 0.0))
    collectives = tuple(hlo.collectives())
    cycles = hlo.cycles()
    return CompiledStep(
        step.name, memory, None, memory.total, None, collectives, counted, accessed, cycles, seconds, lowered.out_info
    )


def memory_of(compiled: Any) -> Memory:
    """What a compiled program takes on one device."""
    stats = compiled.memory_analysis()
    return Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )


def _out_of_memory(message: str) -> tuple[str, int, int] | None:
    """The first line, the bytes that were wanted and those that there are, of XLA's message; None for another one."""
    if "RESOURCE_EXHAUSTED" not in message and "Ran out of memory" not in message:
        return None
    first = message.strip().splitlines()[0]
    used = re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?)", message) or re.search(
        r"\(([\d.]+)([KMGT]?)i?B?\) exceeds available HBM \(([\d.]+)([KMGT]?)", message
    )
    if used is None:
        return first, 0, 0
    return first, int(float(used[1]) * _UNITS[used[2]]), int(float(used[3]) * _UNITS[used[4]])
