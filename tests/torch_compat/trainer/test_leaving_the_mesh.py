"""State that a run leaves to the host when it ends, and what memory that takes."""

from __future__ import annotations

import gc
from typing import Any

import jax
import pytest
import torch
from torch.utils.data import DataLoader

from torch_compat import LightningModule, Trainer
from torch_compat.checkpoint.array_tensors import _Fetch

LAYERS, WIDTH = 4, 64


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def _trainer(**options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", [{"devices": 1}, {"devices": 8, "strategy": "fsdp"}])
def test_the_optimizers_state_is_never_there_twice(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each array of it goes as soon as the host has it: a run that fits in memory ends in it, too."""
    on_devices: list[int] = []
    fetch = _Fetch.__call__

    def noted(self: _Fetch) -> torch.Tensor:
        on_devices.append(sum(array.nbytes for array in jax.live_arrays()))
        return fetch(self)

    monkeypatch.setattr(_Fetch, "__call__", noted)
    _trainer(**options).fit(Net(), DataLoader(torch.ones(16, WIDTH), batch_size=8))
    state = WIDTH * WIDTH * 4
    assert len(on_devices) == 2 * LAYERS
    assert on_devices[0] - on_devices[-1] >= (2 * LAYERS - 1) * state  # more, where something else is collected meanwhile


@pytest.mark.parametrize("options", [{"devices": 1}, {"devices": 8, "strategy": "fsdp"}])
def test_nothing_of_a_module_stays_on_the_mesh(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of ``predict`` left a copy of all parameters there, until garbage was collected."""
    trainer, net, batches = _trainer(**options), Net(), DataLoader(torch.ones(16, WIDTH), batch_size=8)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    monkeypatch.setattr(gc, "collect", lambda *args: 0)
    gc.disable()
    try:
        trainer.fit(net, batches)
        for _ in range(2):
            trainer.predict(net, batches)
        after = sum(array.nbytes for array in jax.live_arrays())
    finally:
        gc.enable()
    assert after - before < WIDTH * WIDTH * 4
