"""A deep module for runs on one process and on several: repeated layers, one read and one written in the middle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer

DEPTH, WIDTH = 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Deep(LightningModule):
    """Reads a layer in the middle of a run (what is whole on each process, on process 0 alone), and writes another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.losses: list[float] = []
        self.alone: list[float] = []
        self.together: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if batch_idx % 2 == 1:
            if jax.process_index() == 0:  # as a logger does
                self.alone += self.get_parameter("blocks.1.norm.weight").detach().tolist()
            self.together += self.get_parameter("blocks.1.up.weight").detach()[0].tolist()
        if batch_idx == 3:
            with torch.no_grad():
                self.get_parameter("blocks.2.down.bias").add_(0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(strategy: Any, devices: int, processes: int = 1, *, folder: Path) -> dict[str, Any]:
    """Six steps; what a user can see of them.

    Args:
        folder: for the run's report.
    """
    report = folder / f"report-{jax.process_index()}.json"
    report.unlink(missing_ok=True)
    os.environ["XLATRAIN_REPORT"] = str(report)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"accelerator": "cpu", "devices": devices, "num_nodes": processes, "gradient_clip_val": 0.1}
    trainer = Trainer(strategy=strategy, max_epochs=1, enable_checkpointing=False, **options)
    rows = 16 // trainer.strategy.data_parallel_size
    data = DataLoader(TensorDataset(torch.randn(6 * 16, WIDTH, generator=torch.Generator().manual_seed(0))), rows)
    torch.manual_seed(3)
    module = Deep()
    trainer.fit(module, data)
    del os.environ["XLATRAIN_REPORT"]
    runs = json.loads(report.read_text())["runs"] if report.exists() else [{"loops": ["told by process 0"]}]
    weights = {name: param.detach().flatten().tolist() for name, param in module.named_parameters()}
    return {
        "losses": module.losses,
        "alone": module.alone,
        "together": module.together,
        "weights": weights,
        "loops": runs[-1]["loops"],
    }
