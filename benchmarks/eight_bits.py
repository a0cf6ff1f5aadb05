"""``python -m benchmarks.eight_bits``: losses of examples/gpt.py in each precision, from equal weights on equal batches."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch

import torch_compat
from benchmarks import hardware
from torch_compat.plugins import EightBitPrecision, HalfPrecision, MixedPrecision, Precision, TransformerEnginePrecision

ROOT = Path(__file__).parents[1]
PRECISIONS: dict[str, Any] = {
    "32-true": Precision,
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed"),
    "int8-mixed": lambda: EightBitPrecision("int8-mixed"),
    "int8-mixed, scales='tensor'": lambda: EightBitPrecision("int8-mixed", scales="tensor"),
    "float8-mixed": lambda: EightBitPrecision("float8-mixed"),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "transformer-engine": lambda: TransformerEnginePrecision(weights_dtype=torch.bfloat16),
}
SIZES = {"length": 64, "width": 96, "n_layers": 3, "n_heads": 4, "dropout": 0.0}
BATCH, LAST = 8, 100


class Losses(torch_compat.Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(outputs["loss"])


def losses(gpt: Any, plugin: Precision, steps: int) -> list[float]:
    """The training losses, and the validation loss after them."""
    torch_compat.seed_everything(0, verbose=False)
    model, data, seen = gpt.GPT(**SIZES), gpt.StandardLibrary(SIZES["length"], BATCH, 0), Losses()
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = torch_compat.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, plugins=[plugin], callbacks=[seen], limit_val_batches=0, **quiet
    )
    trainer.fit(model, data)
    checker = torch_compat.Trainer(accelerator="cpu", devices=1, plugins=[plugin], limit_val_batches=50, **quiet)
    (checked,) = checker.validate(model, data, verbose=False)
    return [*(float(loss) for loss in seen.found), next(value for name, value in checked.items() if "loss" in name)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eight_bits", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    torch_compat.install()
    sys.path.insert(0, str(ROOT / "examples"))
    import gpt  # pyright: ignore[reportMissingImports]

    machine = {**hardware.describe(), "load_before": hardware.load()}
    rows = {}
    for name, make in PRECISIONS.items():
        *found, validation = losses(gpt, make(), steps)
        marks = {f"step {step}": round(found[step - 1], 4) for step in (1, 10, 100, 300, 1000) if step <= steps}
        last = sum(found[-LAST:]) / len(found[-LAST:])
        rows[name] = {**marks, f"mean of the last {LAST}": round(last, 4), "validation": round(validation, 4)}
        print(f"{name:<28}" + "  ".join(f"{key} {value:.4f}" for key, value in rows[name].items()), flush=True)
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d_%H%M")
    result = {"date": today, "machine": machine, "model": {**SIZES, "batch": BATCH}, "steps": steps, "rows": rows}
    (ROOT / "benchmarks" / "results" / f"{today}_eight_bits.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
