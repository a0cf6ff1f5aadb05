"""Compiling one program for devices that are not here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from xlatrain.mesh.mesh import platform
from xlatrain.preflight import libtpu, stored
from xlatrain.preflight.costs import Costs
from xlatrain.preflight.hlo import Collective, Hlo
from xlatrain.preflight.stored import StoredProgram
from xlatrain.step.device_memory import Shortage
from xlatrain.xla import flops
from xlatrain.xla.compilation_cache import nothing_kept
from xlatrain.xla.flops import Flops


@dataclass(frozen=True)
class Work:
    """The arithmetic of a step, on all devices: floating-point operations of products.

    Attributes:
        model: those that the model asks for: nothing that is computed again.
        kernels: those of kernels that XLA calls, which neither a trace nor a compiled program counts.
    """

    model: int
    kernels: int


@dataclass(frozen=True)
class Step:
    """A program and what it is called with.

    Attributes:
        name: ``"train"``, ``"accumulate"``, ``"validation"``, …
        program: a jitted function.
        args: its arguments; arrays are ``jax.ShapeDtypeStruct`` with a sharding, or numpy arrays.
        work: where it is known.
    """

    name: str
    program: Any
    args: tuple[Any, ...]
    work: Work | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments, outputs: of the program, with the padding of the chip's layouts.
        aliased: outputs that take the place of donated arguments.
        temporaries: everything else at the peak.
        code: the program itself.
        host: of the memory of its host: arguments and temporaries that lie there. 0 for CPUs.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    host: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class CompiledStep:
    """The findings of compiling a step.

    Attributes:
        name: of the step.
        memory: where it fits, else None.
        refused: the compiler's words where it does not fit.
        needed: bytes per device that the compiler asked for.
        available: bytes per device that the compiler found too few; None where it fits.
        collectives: empty where it does not fit.
        flops: on all devices, as traced, and those of kernels.
        costs: of the compiled program, on one device.
        seconds: of trace, lower and compile.
        out: shapes of what it returns.
        stored: where its StableHLO was kept; None where nobody asked.
        work: as the step's.
    """

    name: str
    memory: Memory | None
    refused: str | None
    needed: int
    available: int | None
    collectives: tuple[Collective, ...]
    flops: Flops
    costs: Costs
    seconds: dict[str, float]
    out: Any
    stored: StoredProgram | None = None
    work: Work | None = None

    @property
    def cycles(self) -> int:
        """The compiler's estimate, kernels left out."""
        return sum(self.costs.cycles.values())


def compile_step(step: Step, mesh: Mesh, store: Path | None = None) -> CompiledStep:
    """Trace, lower and compile a step for the devices of its mesh.

    Args:
        store: a folder to keep its StableHLO in.

    Raises:
        Exception: what JAX or XLA raise where the program is wrong; not fitting into memory is no error.
    """
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    traced = step.program.trace(*step.args)
    seconds["trace"] = time.perf_counter() - start
    counted = flops.count(traced.jaxpr)
    if step.work is not None:
        counted += Flops(step.work.kernels, step.work.kernels)
    start = time.perf_counter()
    lowered = traced.lower()
    seconds["lower"] = time.perf_counter() - start
    kept = None if store is None else stored.store(lowered, step.name, store)
    start = time.perf_counter()
    try:
        with libtpu.quiet_stderr(), nothing_kept(platform(mesh)):
            compiled = lowered.compile()
    except Exception as error:
        short = Shortage.from_error(error)
        if short is None:
            raise
        seconds["compile"] = time.perf_counter() - start
        return CompiledStep(
            step.name,
            None,
            short.words,
            short.wanted,
            short.available or 0,
            (),
            counted,
            Costs(),
            seconds,
            lowered.out_info,
            kept,
            step.work,
        )
    seconds["compile"] = time.perf_counter() - start
    memory = memory_of(compiled)
    hlo = Hlo(compiled.as_text(), mesh)
    return CompiledStep(
        step.name,
        memory,
        None,
        memory.total,
        None,
        tuple(hlo.collectives()),
        counted,
        hlo.costs(),
        seconds,
        lowered.out_info,
        kept,
        step.work,
    )


def memory_of(compiled: Any) -> Memory:
    """The memory that a compiled program takes on one device."""
    stats = compiled.memory_analysis()
    return Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
        stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
    )
