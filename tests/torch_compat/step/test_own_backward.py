"""An overridden backward that changes something on the host, beside hooks that come before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer


class Ordered(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.seen.append("hook")

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.seen.append("backward")
        loss.backward()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_its_effects_come_after_the_hooks_before_it(tmp_path: Any) -> None:
    module = Ordered()
    trainer = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, devices=1, default_root_dir=tmp_path
    )
    with pytest.warns(
        UserWarning, match=r"backward, which Ordered or a plugin overrides, changes self\.seen, and on_before_backward"
    ):
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(3, 2)), batch_size=1))
    assert module.seen == ["hook", "backward"] * 3
