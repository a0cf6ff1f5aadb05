"""``python -m benchmarks models``: a zoo of models beside eager torch and inductor, on one core. Not part of the default run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measurements import Row
from benchmarks.processes import run_script
from benchmarks.result import FAILED

MOST = 1.05
MOST_OF_A_CALL = 1.3
MOST_MEMORY = 1.15
MODELS = (
    *("gpt", "bert_tiny", "vit_tiny", "mlp", "resnet_18_at_64", "resnet_18_at_128", "gan", "gnn", "lstm", "unet_at_64"),
    *("efficientnet_b0", "mobilenet_v3", "convnext_tiny", "wavenet", "unet_3d", "gru", "mixture_of_experts", "diffusion_unet"),
    "t5_small",
)


def models(steps: int, chosen: Sequence[str] = MODELS) -> Iterator[Row]:
    """Processor time of steps and of ``predict``, of the first step in a first and in a second process, and peak memory.

    Ours twice, eager Lightning, and Lightning with a compiled net where torch can compile it; each in a process, on one core.

    Args:
        steps: of each; the first two are not among the median's.
        chosen: names of models.
    """
    for name in chosen:
        try:
            yield from _rows(name, _lanes(name, steps))
        except RuntimeError as error:
            yield Row(name, FAILED, "", False, str(error).strip().splitlines()[-1][:200])


def _lanes(name: str, steps: int) -> dict[str, dict[str, Any]]:
    flags = ("--model", name, "--steps", str(steps))
    with tempfile.TemporaryDirectory() as folder:
        kept = {"JAX_ENABLE_COMPILATION_CACHE": "true", "XLATRAIN_CACHE_DIR": f"{folder}/jax"}
        compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        cold = run_script("models", *flags, settings=kept, one_core=True)
        eager = run_script("models", *flags, stock=True, one_core=True)
        warm = run_script("models", *flags, settings=kept, one_core=True)
        lanes = {"cold": cold, "warm": warm, "eager": eager}
        with contextlib.suppress(RuntimeError):  # there are nets that it cannot compile
            lanes["inductor"] = run_script("models", *flags, "--inductor", stock=True, settings=compiled, one_core=True)
    return lanes


def _rows(name: str, lanes: dict[str, dict[str, Any]]) -> Iterator[Row]:
    cold, warm, eager = (lanes[lane] for lane in ("cold", "warm", "eager"))
    stock = {lane: found for lane, found in lanes.items() if lane in ("eager", "inductor")}
    deviation = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(warm["losses"], eager["losses"], strict=True))
    for what in ("train", "predict"):
        ours = min(cold[what]["median"], warm[what]["median"])
        ratio = ours / min(found[what]["median"] for found in stock.values())
        beside = "; ".join(f"{lane} {_of(found[what])}" for lane, found in stock.items())
        detail = f"ours {_of(cold[what])}, {_of(warm[what])}; {beside} ms"
        detail += f"; losses deviate {deviation:.0e}" if what == "train" else ""
        yield Row(f"{name} {what}", f"{ratio:.2f} x", f"<= {MOST} x", ratio <= MOST, detail)
    ours, theirs = (found["predict_again_ms"] for found in (warm, eager))
    detail = f"ours {ours:.1f}, eager {theirs:.1f} ms; the least of six calls of 5 batches"
    yield Row(
        f"{name} predict again", f"{ours / theirs:.2f} x", f"<= {MOST_OF_A_CALL} x", ours / theirs <= MOST_OF_A_CALL, detail
    )
    first = {lane: found["train"]["first"] / 1e3 for lane, found in lanes.items()}
    detail = ", ".join(f"{lane} {time:.1f}" for lane, time in first.items())
    yield Row(f"{name} first step, warm", f"{first['warm']:.1f} s", "", None, f"{detail} s, from Trainer() on")
    ratio = warm["peak_mib"] / eager["peak_mib"]
    detail = ", ".join(f"{lane} {found['peak_mib']:.0f}" for lane, found in lanes.items())
    yield Row(f"{name} peak memory", f"{ratio:.2f} x", f"<= {MOST_MEMORY} x", ratio <= MOST_MEMORY, f"{detail} MiB")


def _of(found: dict[str, float]) -> str:
    return f"{found['median']:.1f} ({found['low']:.1f} to {found['high']:.1f})"


def worst_first(rows: Sequence[Row]) -> list[Row]:
    """The rows that are a ratio, the largest first."""
    return sorted((row for row in rows if row.is_ratio), key=lambda row: -row.ratio)
