"""The time of a step if the chip and its links ran at their peak: a roofline, with its assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xlatrain.preflight.chips import Chip
from xlatrain.preflight.costs import REGIONS
from xlatrain.preflight.hlo import Collective
from xlatrain.preflight.program import CompiledStep
from xlatrain.preflight.topology import Topology
from xlatrain.xla.flops import Flops
from xlatrain.xla.peak_flops import peak_flops


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of one optimizer step. No program reaches a roofline: compare estimates, expect a slower real step.

    Attributes:
        step_seconds: compute, memory and network overlap perfectly: the longest of the three.
        step_seconds_without_overlap: nothing overlaps: their sum.
        compute_seconds, memory_seconds, network_seconds: each alone.
        mfu: model FLOPs utilisation at ``step_seconds``: what the model asks for, over what the chips' peak would do in that
            time. Nothing that is computed again counts, where it is known what is.
        hfu: the same of all that is computed.
        compiler_seconds: the compiler's own estimate of what it schedules, kernels at half of the peak, and collectives that
            nothing goes on beside; None where the chip's clock is not known. Good for comparing programs.
        compiler_mfu: model FLOPs utilisation in that time.
        regions: region of the program → seconds of ``compute``, ``memory`` and ``compiler`` on one device.
        rows_per_second: of the whole mesh at ``step_seconds``.
        bound: which of the three is the longest.
        assumptions: in words.
    """

    step_seconds: float
    step_seconds_without_overlap: float
    compute_seconds: float
    memory_seconds: float
    network_seconds: float
    mfu: float
    rows_per_second: float | None
    bound: str
    assumptions: tuple[str, ...]
    hfu: float = 0.0
    compiler_seconds: float | None = None
    compiler_mfu: float | None = None
    regions: dict[str, dict[str, float]] = field(default_factory=dict)


def estimate(steps: Sequence[tuple[CompiledStep, int]], topology: Topology, device: object, rows: int | None) -> Estimate | None:
    """The roofline of an optimizer step; None for devices whose peaks are not known (CPUs).

    Args:
        steps: the programs of the step, and how often each runs.
        device: one of the topology's.
        rows: of the global batch, over all accumulated batches.
    """
    chip, peak = topology.chip, peak_flops(device, "bfloat16")
    if chip is None or peak is None or any(step.memory is None for step, _ in steps):
        return None
    devices = topology.chips * chip.devices
    total = sum(step.flops.total * times for step, times in steps)
    compute = sum(passes(step.flops, device) * times for step, times in steps) / devices / peak
    hbm = chip.hbm_bandwidth / chip.devices
    memory = sum(sum(step.costs.traffic.values()) * times for step, times in steps) / hbm
    network = sum(_seconds(one, topology) * one.count * times for step, times in steps for one in step.collectives)
    parts = {"compute": compute, "memory": memory, "network": network}
    longest = max(parts.values()) or float("inf")
    model = sum((step.flops.total if step.work is None else step.work.model) * times for step, times in steps)
    known = all(step.work is not None for step, _ in steps)
    compiled = _compiler_seconds(steps, topology, devices * peak)
    return Estimate(
        step_seconds=longest,
        step_seconds_without_overlap=sum(parts.values()),
        compute_seconds=compute,
        memory_seconds=memory,
        network_seconds=network,
        mfu=model / (devices * peak * longest),
        rows_per_second=None if rows is None else rows / longest,
        bound=max(parts, key=parts.__getitem__),
        assumptions=(
            f"matrix units at their bfloat16 peak, {peak / 1e12:g} TFLOP/s per device; float32 products at torch's "
            f"'highest' precision take 6 passes, at 'high' 3, at 'medium' 1{_in_float32(steps)}",
            *_eight_bits(steps, device),
            f"memory at {hbm / 1e9:,.0f} GB/s per device; traffic: what the compiled program's instructions read and write, "
            "loops times their trips, a kernel's operands once",
            f"each mesh axis is a ring over links of {chip.ici_bandwidth / 1e9:g} GB/s in both directions; axes take turns",
            *([f"{chip.dcn_bandwidth / 1e9:g} GB/s per chip between slices"] if topology.num_slices > 1 else []),
            "compute, memory and network overlap perfectly; the host feeds batches in time",
            "FLOPs are those of matrix products and convolutions; MFU counts each once, HFU what is recomputed again"
            if known
            else "the FLOPs are those of matrix products and convolutions as traced; what is recomputed counts for MFU too",
        ),
        hfu=total / (devices * peak * longest),
        compiler_seconds=compiled,
        compiler_mfu=None if not compiled else model / (devices * peak * compiled),
        regions=_regions(steps, chip, device, hbm),
    )


def _in_float32(steps: Sequence[tuple[CompiledStep, int]]) -> str:
    """How much longer products take because some are in float32, and what makes them shorter; nothing where they do not."""
    total, taken = (sum(getattr(step.flops, name) * times for step, times in steps) for name in ("total", "bf16_passes"))
    if taken <= total:
        return ""
    return f": {taken / total:.1f} on average here, 1 after torch.set_float32_matmul_precision('medium')"


_EIGHT_BITS = {"int8": "int8", "float8": "float8_e4m3fn"}
"""Kinds of products of eight bits, and the dtype of whose peak they are."""


def _faster(device: object, kind: str) -> float:
    """How many times faster than bfloat16's a chip's products of eight bits are; 1 where it does not say."""
    peaks = [peak_flops(device, dtype) for dtype in (_EIGHT_BITS[kind], "bfloat16")]
    return peaks[0] / peaks[1] if peaks[0] and peaks[1] else 1.0


def passes(flops: Flops, device: object) -> float:
    """The passes of products in bfloat16 that take as long as those of a program."""
    return flops.bf16_passes - _saved({"int8": flops.int8, "float8": flops.float8}, device)


def _saved(flops: Mapping[str, int], device: object) -> float:
    """FLOPs by kind → the passes that a chip saves."""
    return sum(some * (1 - 1 / _faster(device, kind)) for kind, some in flops.items())


def _eight_bits(steps: Sequence[tuple[CompiledStep, int]], device: object) -> list[str]:
    """Sentences about what is assumed of products of eight bits; none where there are no such products."""
    total = sum(step.flops.total * times for step, times in steps)
    found = []
    for kind in _EIGHT_BITS:
        if some := sum(getattr(step.flops, kind) * times for step, times in steps):
            found.append(f"products in {kind}, {some / total:.0%} of the FLOPs, at {_faster(device, kind):g} times that peak")
    if found:
        found.append("MFU and HFU are of the bfloat16 peak, so that they may exceed 100%")
    return found


def _compiler_seconds(steps: Sequence[tuple[CompiledStep, int]], topology: Topology, peak: float) -> float | None:
    """The compiler's cycles, kernels at half of the peak of all devices, and synchronous collectives."""
    chip = topology.chip
    if chip is None or chip.clock is None:
        return None
    total = 0.0
    for step, times in steps:
        kernels = 0 if step.work is None else step.work.kernels
        waited = sum(_seconds(one, topology) * one.count for one in step.collectives if not one.asynchronous)
        total += (step.cycles / chip.clock + kernels / (peak / 2) + waited) * times
    return total


def _regions(steps: Sequence[tuple[CompiledStep, int]], chip: Chip, device: object, hbm: float) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    peak = peak_flops(device, "bfloat16") or float("inf")
    for region in REGIONS:
        flops, int8, float8, traffic, cycles = (
            sum(getattr(step.costs, kind)[region] * times for step, times in steps)
            for kind in ("flops", "int8", "float8", "traffic", "cycles")
        )
        needed = flops - _saved({"int8": int8, "float8": float8}, device)
        found[region] = {
            "compute": needed / peak,
            "memory": traffic / hbm,
            "compiler": cycles / chip.clock if chip.clock else 0.0,
        }
    return found


def _seconds(one: Collective, topology: Topology) -> float:
    chip = topology.chip
    assert chip is not None
    return one.wire_bytes / (chip.dcn_bandwidth if one.axes == ("dcn",) else 2 * chip.ici_bandwidth)
