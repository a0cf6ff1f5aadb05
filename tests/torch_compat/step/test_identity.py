"""A step of the Trainer tells objects apart that have one class, one name, or one address after another."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_compat import LightningModule, Trainer

X = torch.linspace(-1, 1, 8).reshape(4, 2)
CHOICES = [lambda x: x * 2, lambda x: x + 1, lambda x: x - 3, lambda x: -x]


def noter() -> Callable[[Tensor], Tensor]:
    """A function that remembers, and does something else once it remembers much."""
    log: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        log.append(x.detach().mean())
        return x if len(log) < 3 else x * 2

    note.log = log  # pyright: ignore[reportFunctionMemberAccess]
    return note


class Model(LightningModule):
    """Takes another function, and another of its layers, for each batch; two of its functions are made by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))
        self.notes = noter(), noter()
        self.function: Any = None
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.function = None
        gc.collect()  # so that the next has the address of the last
        weight = float(batch_idx)
        self.function = lambda x: CHOICES[batch_idx](x) + weight
        self.layer = self.layers[batch_idx % 3]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y = self.notes[0](self.function(self.layer(batch)))
        if batch_idx % 2:
            y = self.notes[1](y + 1)
        loss = y.square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(X, batch_size=1)  # pyright: ignore[reportArgumentType]


def test_functions_and_layers_that_differ_by_what_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Functions at one address after another, functions that one function made, and layers of one class."""
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    plain = Model()
    optimizer = plain.configure_optimizers()
    for index, batch in enumerate(X.split(1)):
        plain.on_train_batch_start(batch, index)
        loss = plain.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model = Model()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=1, devices=1, enable_model_summary=False, default_root_dir=tmp_path, **quiet).fit(model)
    torch.testing.assert_close(torch.stack(model.losses), torch.stack(plain.losses), rtol=1e-4, atol=1e-5)
    for ours, its in zip(model.notes, plain.notes, strict=True):
        torch.testing.assert_close(torch.stack(ours.log), torch.stack(its.log), rtol=1e-4, atol=1e-5)  # pyright: ignore[reportFunctionMemberAccess]
