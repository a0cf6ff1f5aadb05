"""A small module and its data, for the tests of plugins."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from xlatrain.bridge import host_draws


def loader(rows: int = 32, batch_size: int = 2) -> DataLoader:
    """Rows of 4 features and a target."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(rows, 4, generator=generator), torch.randn(rows, 1, generator=generator)), batch_size
    )


@contextlib.contextmanager
def drawing_in_programs() -> Iterator[None]:
    """Random numbers of steps are those of a mesh, also on one device, where torch would draw them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_draws, "MOST_BYTES", 0)
        yield


class Net(LightningModule):
    """Linear regression; the same weights every time."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(4, 1)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def trainer(**arguments: Any) -> Trainer:
    """A Trainer on eight devices that writes nothing."""
    defaults = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{"accelerator": "cpu", "devices": 8, "max_epochs": 1, "num_sanity_val_steps": 0, **defaults, **arguments})


def trained(net: Net | None = None, **arguments: Any) -> Net:
    """A net after one epoch: two steps."""
    net = net or Net()
    trainer(**arguments).fit(net, loader())
    return net


def weights(module: torch.nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
