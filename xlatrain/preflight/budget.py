"""Budgets for tests: a user's own CI says when a module has outgrown its pod, or its sharding has changed for the worse.

::

    def test_fits():
        report = Trainer(strategy="fsdp").preflight(Model(), loader, topology="v5e:4x4", suggest=False)
        assert_fits(report, gib_per_chip=12)
        assert_collectives(report, "fsdp", at_most=3e9)
"""

from __future__ import annotations

from xlatrain.preflight.report import Report
from xlatrain.preflight.text import PARTS, size


def assert_fits(report: Report, gib_per_chip: float | None = None) -> None:
    """The run fits, and its largest program takes at most so many GiB (2**30 bytes) on a chip; None: what the chip has.

    Raises:
        AssertionError: says by how much it is too large, and what takes most.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    sizes = report.bytes_per_chip
    limit = sizes["hbm"] if gib_per_chip is None else gib_per_chip * 2**30
    if report.fits and sizes["total"] <= limit:
        return
    parts = ", ".join(f"{part} {size(sizes[part])}" for part in PARTS)
    arrays = ", ".join(f"{one.path} {size(one.bytes_per_chip)} ({one.spec})" for one in report.largest[:3])
    raise AssertionError(
        f"{size(sizes['total'])} per chip on {report.topology}, {size(sizes['total'] - limit)} over the budget of {size(limit)}: "
        f"{parts}. Largest arrays: {arrays}"
    )


def assert_collectives(report: Report, axis: str, at_most: float) -> None:
    """The collectives of one optimizer step along a mesh axis move at most so many bytes on one device.

    Args:
        axis: ``"data"``, ``"fsdp"``, …; ``"dcn"`` between slices. Collectives over two axes at once are under ``"data+fsdp"``.
        at_most: bytes.

    Raises:
        AssertionError: says which kinds of collectives there are; or nothing was compiled because the run does not fit.
    """
    __tracebackhide__ = True
    if not report.fits:
        raise AssertionError(f"the run does not fit {report.topology}, so its collectives are not known")
    kinds = report.collectives.get(axis, {})
    total = sum(found["bytes"] for found in kinds.values())
    if total <= at_most:
        return
    listed = ", ".join(f"{found['count']} × {kind} {size(found['bytes'])}" for kind, found in sorted(kinds.items()))
    raise AssertionError(f"collectives on axis {axis!r} take {size(total)} in a step, budget {size(at_most)}: {listed}")
