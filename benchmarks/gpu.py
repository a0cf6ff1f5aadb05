"""``python -m benchmarks gpu``: one GPU, through JAX's CUDA plugin, beside stock Lightning on it. Not part of the default run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.measurements import Row
from benchmarks.processes import run_script

_OURS = {"JAX_PLATFORMS": "cuda,cpu"}
_CASES = {"gpt": ("32-true", "bf16-mixed"), "bert": ("bf16-mixed",), "resnet": ("bf16-mixed",)}
_LARGEST_DEVIATION = {"32-true": 2e-3, "bf16-mixed": 5e-2}
"""Of the losses of the first ten steps: kernels and orders of sums differ."""
_WAYS = {"stock": {"stock": True}, "stock, torch.compile": {"stock": True}, "here": {"settings": _OURS}}


def gpu(steps: int, *flags: str) -> Iterator[Row]:
    """A GPT, BERT with padded rows, ResNet-50: time of a step and peak memory, under stock, with torch.compile, and here.

    Args:
        steps: measured, one way after the other.
        flags: more of ``scripts/gpu.py``; ``--platform cpu --size tiny`` only shows that the command works.

    Raises:
        RuntimeError: no GPU, or the losses deviate.
    """
    on_cpu = "cpu" in flags
    for model, precisions in _CASES.items():
        for precision in precisions:
            chosen = ("--model", model, "--precision", precision, "--steps", str(steps), *flags)
            found: dict[str, dict[str, Any]] = {}
            for way, options in _WAYS.items():
                more = ("--compile",) if "compile" in way else ()
                found[way] = run_script("gpu", *chosen, *more, **({"stock": options.get("stock", False)} if on_cpu else options))
            yield from _rows(f"{model}, {precision}", found)
            deviation = _deviation(found["here"]["losses"], found["stock"]["losses"])
            if deviation > _LARGEST_DEVIATION[precision]:
                raise RuntimeError(f"benchmark gpu: the losses of {model}, {precision} deviate from stock's by {deviation:.1e}")


def _rows(name: str, found: dict[str, dict[str, Any]]) -> Iterator[Row]:
    here = found["here"]
    deviation = _deviation(here["losses"], found["stock"]["losses"])
    for way, run in found.items():
        detail = f"first step {run['first_s']:.1f} s, memory {run['peak_gb']:.2f} GB"
        yield Row(f"{name}: {way}", f"{run['ms']:.2f} ms", "", None, detail)
    for way in ("stock", "stock, torch.compile"):
        ratio = found[way]["ms"] / here["ms"]
        detail = f"losses deviate by {deviation:.1e}" if way == "stock" else ""
        yield Row(f"  speed / {way}", f"{ratio:.2f} x", ">= 1.00 x", ratio >= 1, detail)


def _deviation(ours: list[float], theirs: list[float]) -> float:
    """The largest relative one of the first ten losses."""
    one, other = (np.array(losses[:10]) for losses in (ours, theirs))
    return float(np.max(np.abs(one - other) / np.abs(other)))
