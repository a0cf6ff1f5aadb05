"""Trains examples/gpt.py and examples/nnx_gpt.py from equal weights on the same batches, and prints their losses as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import torch

import torch_compat

torch_compat.install()
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import gpt  # noqa: E402
import nnx_gpt  # noqa: E402

SIZES = {"length": 32, "width": 32, "n_layers": 2, "n_heads": 2}


class Losses(torch_compat.Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(outputs["loss"])


def optimizer(_: Any) -> optax.GradientTransformation:
    return optax.adamw(1e-2)


class TorchGPT(gpt.GPT):
    configure_optimizers = optimizer


class NnxGPT(nnx_gpt.GPT):
    configure_optimizers = optimizer


def copy_weights(source: TorchGPT, target: NnxGPT) -> None:
    def linear(layer: torch.nn.Linear, into: Any) -> None:
        into.kernel[...] = jnp.asarray(layer.weight.detach().numpy().T)
        into.bias[...] = jnp.asarray(layer.bias.detach().numpy())

    target.tokens.embedding[...] = jnp.asarray(source.tokens.weight.detach().numpy())
    target.positions.embedding[...] = jnp.asarray(source.positions.weight.detach().numpy())
    for ours, theirs in zip(target.blocks, source.blocks, strict=True):
        linear(theirs.qkv, ours.qkv)
        linear(theirs.out, ours.out)
        linear(theirs.mlp[0], ours.up)
        linear(theirs.mlp[2], ours.down)


def losses(model: Any, devices: int, steps: int) -> list[float]:
    data = (torch.arange(32 * 16 * steps + 1) ** 2 % 61).to(torch.uint8)
    loader = torch.utils.data.DataLoader(gpt.ByteWindows(data, 32), 16 // devices)
    seen = Losses()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = torch_compat.Trainer(accelerator="cpu", devices=devices, max_steps=steps, callbacks=[seen], **quiet)
    trainer.fit(model, loader)
    return [float(loss) for loss in seen.found]


def main(steps: int) -> None:
    found = {}
    for devices in (1, 8):
        torch.manual_seed(0)
        source, target = TorchGPT(**SIZES), NnxGPT(**SIZES)
        copy_weights(source, target)
        found[devices] = [losses(model, devices, steps) for model in (source, target)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
