"""``python -m benchmarks convolutions``: a model zoo's convolutions, ours ÷ torch's, on one core. Not part of the default run."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.measurements import Row
from benchmarks.processes import run_script

_MOST = 1.2


def convolutions(*flags: str) -> Iterator[Row]:
    """Processor time of each convolution, its gradient by input and that by weight, as our lowerings have them.

    Args:
        flags: of ``scripts/convolutions.py``.

    Raises:
        RuntimeError: a result deviates from torch's.
    """
    for name, times in run_script("convolutions", *flags, stock=True, one_core=True).items():
        ratio = times["xla"] / times["torch"]
        yield Row(name, f"{ratio:.2f} x", f"<= {_MOST} x", ratio <= _MOST, f"{times['xla']:.2f} against {times['torch']:.2f} ms")
