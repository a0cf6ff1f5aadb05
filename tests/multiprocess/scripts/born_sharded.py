"""Two runs of a module made in ``configure_model``; what it was at each step, and that no process had it whole."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from xlatrain.bridge.tensors.live import live_array
from xlatrain.cluster import distributed

DIRECTORY = Path(sys.argv[1])
STATE = sys.argv[2]


class Born(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(8, 640), nn.ReLU(), nn.Linear(640, 640), nn.Linear(640, 1))
            nn.init.orthogonal_(self.net[0].weight)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if self.trainer.global_step == 2 and not Path(STATE).exists():
            self.trainer.save_checkpoint(STATE)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(max_steps: int, resume: str | None = None) -> Born:
    torch.manual_seed(5)
    module = Born()
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = Trainer(
        accelerator="cpu", devices=jax.local_device_count(), num_nodes=jax.process_count(), strategy="fsdp", max_steps=max_steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 2), ckpt_path=resume)
    return module


def differing() -> str:
    """The error where the processes make different modules."""

    class Other(Born):
        def configure_model(self) -> None:
            self.net = nn.Sequential(nn.Linear(8, 640), nn.Linear(640, 640 + jax.process_index()), nn.Linear(640, 1))

    trainer = Trainer(
        accelerator="cpu", devices=jax.local_device_count(), num_nodes=jax.process_count(), strategy="fsdp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, max_steps=1,
    )  # fmt: skip
    x = torch.zeros(64, 8)
    try:
        trainer.fit(Other(), DataLoader(TensorDataset(x, x[:, :1]), 2))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def main() -> None:
    os.environ["XLATRAIN_HOST_MEMORY"] = str(1 << 20)
    module = fit(2) if jax.process_count() > 1 else fit(4)
    found: dict[str, Any] = {"losses": module.losses, "kept": live_array(module.net[2].weight) is not None}
    if jax.process_count() > 1:
        found["continued"] = fit(4, STATE).losses
        found["error"] = differing()
    os.environ["XLATRAIN_HOST_MEMORY"] = str(1 << 30)
    found["sum"] = module.net[2].weight.double().sum().item()
    (DIRECTORY / f"{jax.process_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    distributed.initialize()
    main()
