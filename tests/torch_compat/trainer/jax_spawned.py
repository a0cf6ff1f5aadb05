"""A JaxModule in two processes that its strategy starts; prints what came back."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import optax
import torch
from flax import nnx

import torch_compat as pl
import xlatrain


class Early(xlatrain.JaxModule):
    """Makes its variables in ``__init__``."""

    def __init__(self) -> None:
        self.make()

    def make(self) -> None:
        self.layer = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    def training_step(self, batch: Any) -> jax.Array:
        loss = ((self.layer(batch[0]) - batch[1]) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)

    def train_dataloader(self) -> Any:
        x = torch.arange(64.0).reshape(16, 4) / 64
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 4)


class Late(Early):
    """Makes them in ``configure_model``."""

    def __init__(self) -> None:
        pass

    def configure_model(self) -> None:
        self.make()


def fitted(module: Any, strategy: str) -> list[Any]:
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    return [np.asarray(module.layer.kernel[...]).ravel().tolist(), trainer.global_step]


if __name__ == "__main__":
    spawned = [fitted(Early(), "ddp_spawn"), fitted(Late(), "ddp_spawn")]
    print(json.dumps([*spawned, fitted(Early(), "ddp")]))
