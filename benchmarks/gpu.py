"""``python -m benchmarks gpu``: one GPU, through JAX's CUDA plugin, beside eager torch on it. Not part of the default run."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.measurements import Row
from benchmarks.processes import run_script

# Both memories side by side: JAX must not take three quarters of it at once.
_SETTINGS = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_LARGEST_DEVIATION = {"32-true": 1e-2, "bf16-mixed": 5e-2}  # of losses over 30 steps; TF32 and the order of sums differ


def gpu(steps: int, platform: str = "gpu", *size: str) -> Iterator[Row]:
    """A GPT's step in float32 and bfloat16: its time beside eager torch's (if torch has CUDA), and whether the losses agree.

    Args:
        steps: measured.
        platform: ``"cpu"`` only to see that the command works.
        size: more flags of ``scripts/gpu.py``.

    Raises:
        RuntimeError: JAX finds no GPU, or the losses deviate.
    """
    settings = _SETTINGS if platform == "gpu" else {}
    lanes = ("--lanes", "torch") if platform == "cpu" or _torch_has_cuda() else ()
    for precision, allowed in _LARGEST_DEVIATION.items():
        flags = ("--platform", platform, "--precision", precision, "--steps", str(steps), *lanes, *size)
        found = run_script("gpu", *flags, settings=settings)
        trainer = found["median_ms"]["trainer"]
        yield Row(f"GPT on {platform}, {precision}", f"{trainer:.2f} ms", "", None, f"median of {found['steps']} steps")
        yield Row("  first step, compiled", f"{found['first_s']['trainer']:.1f} s", "", None, "")
        if lanes:
            torch_ms, deviation = found["median_ms"]["torch"], found["loss_deviation"]["torch"]
            detail = f"{torch_ms:.2f} against {trainer:.2f} ms, interleaved; losses deviate by {deviation:.1e}"
            yield Row("  speed / eager torch", f"{torch_ms / trainer:.2f} x", ">= 1.00 x", torch_ms >= trainer, detail)
            if deviation > allowed:
                raise RuntimeError(
                    f"benchmark gpu: the losses with precision={precision} deviate from torch's by {deviation:.1e}"
                )


def _torch_has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
