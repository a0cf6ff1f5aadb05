"""A report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from xlatrain.preflight.report import Change, Report
from xlatrain.step.device_memory import size

PARTS = ("parameters", "gradients", "optimizer", "batch", "temporaries")


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def lines(report: Report) -> Iterator[str]:
    """The report's text."""
    pod = report.topology if report.num_slices == 1 else f"{report.num_slices} × {report.topology}"
    sizes = report.bytes_per_chip
    axes = " × ".join(f"{name} {count}" for name, count in report.mesh.items())
    verdict = "FITS" if report.fits else f"DOES NOT FIT: {size(report.missing)} too much on each chip"
    yield f"{verdict}   {pod}, {report.chips} chips, mesh {axes}"
    yield f"{report.parameters:,} parameters; {size(sizes['total'])} of {size(sizes['hbm'])} per chip"
    for part in PARTS:
        name = "activations and temporaries" if part == "temporaries" else part
        yield f"  {name:28} {size(sizes[part]):>12}"
    if sizes.get("host"):  # reports of older versions do not say
        yield f"  {'and in host memory':28} {size(sizes['host']):>12}"
    if report.replicated_bytes:
        yield f"  replicated on every device: {size(report.replicated_bytes)} of these"
    if not report.fits:
        yield from _why(report)
    yield "largest arrays per chip:"
    for one in report.largest[:5]:
        yield f"  {size(one.bytes_per_chip):>12}  {one.path} {list(one.shape)} {one.dtype}, {one.spec}, {one.replicas} copies"
    yield "collectives of one optimizer step, on one device:"
    for axis, kinds in sorted(report.collectives.items()):
        for kind, found in sorted(kinds.items()):
            waited = found.get("synchronous_bytes", 0)  # reports of older versions do not say
            told = f", {size(waited)} of it synchronous" if waited else ""
            yield f"  {axis:8} {found['count']:>5} × {kind:18} {size(found['bytes']):>12}{told}"
    if not report.collectives:
        yield "  none" if report.fits else "  not known: nothing was compiled"
    yield f"FLOPs of one optimizer step, all chips: {report.flops_per_step:.4g}"
    yield from _estimate(report)
    if report.search:
        yield "search, the best first:"
    for one in report.search[:12]:
        rate = one["rows_per_second_per_chip"]
        told = one["reason"] or f"{size(one['total'])} per chip" + (
            "" if rate is None else f", at most {rate:,.1f} rows/s per chip"
        )
        yield f"  {'fits' if one['fits'] else 'does not fit':12}  {one['what']}: {told}"
    for name, given in (("attention", report.attention), ("repeated layers", report.loops), ("notes", report.notes)):
        if given:
            yield f"{name}:"
            yield from (f"  {text}" for text in given)
    spent = ", ".join(f"{name} {value:.1f} s" for name, value in report.seconds.items())
    yield f"preflight: {spent}; {size(report.peak_memory)} of host memory at its peak"


def verdict_of(change: Change) -> str:
    """Whether a run fits with the change."""
    return "not tried" if change.fits is None else "fits" if change.fits else "does not fit"


def _why(report: Report) -> Iterator[str]:
    yield "the five largest:"
    yield from (f"  {size(one['bytes_per_chip']):>12}  {one['what']}" for one in report.contributors)
    if report.changes:
        yield "changes that were tried:"
    for change in report.changes:
        detail = f": {change.reason}" if change.reason else f", {size(change.total)} per chip"
        yield f"  {verdict_of(change):12}  {change.what}{detail}"


def _estimate(report: Report) -> Iterator[str]:
    found = report.estimate
    if found is None:
        return
    rate = "" if found.rows_per_second is None else f", {found.rows_per_second:,.0f} rows/s"
    yield (
        f"roofline: at least {duration(found.step_seconds)} a step ({found.bound}-bound), MFU at most {found.mfu:.1%} "
        f"(HFU {found.hfu:.1%}){rate}; "
        f"{duration(found.step_seconds_without_overlap)} if nothing overlaps"
    )
    yield (
        f"  compute {duration(found.compute_seconds)}, memory {duration(found.memory_seconds)}, "
        f"network {duration(found.network_seconds)}"
    )
    for region, seconds in found.regions.items():
        parts = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items() if value)
        yield f"  {region:12} {parts or 'nothing'}"
    if found.compiler_seconds is not None:
        yield (
            f"  by the compiler's cycles, kernels at half of the peak and synchronous collectives: "
            f"{duration(found.compiler_seconds)}, MFU {found.compiler_mfu or 0:.1%}"
        )
    yield from (f"  assumed: {text}" for text in found.assumptions)
    cycles = ", ".join(f"{step.name} {step.cycles:,}" for step in report.steps if step.cycles)
    if cycles:
        yield f"  the compiler's own estimates, in cycles (relative only: compare programs with each other): {cycles}"
