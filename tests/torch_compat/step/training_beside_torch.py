"""A short training, by torch alone and by our Trainer: what tests of the memory of arrays and tensors compare."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer

BATCHES = 4
Net = TypeVar("Net", bound=LightningModule)


def batches() -> DataLoader[Any]:
    """Four of four rows, the same each time."""
    x = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.flip(1)), 4)


def by_torch(net: Net) -> Net:
    """Train with torch alone, with the one hook that these tests have."""
    optimizer: Any = net.configure_optimizers()
    for index, batch in enumerate(batches()):
        optimizer.zero_grad()
        outputs = net.training_step(batch, index)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        loss.backward()
        optimizer.step()
        net.on_train_batch_end(outputs, batch, index)
    return net


def by_trainer(net: LightningModule) -> Trainer:
    """Train on one device; the Trainer shows whether the step was compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            max_epochs=1,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(net, batches())
    return trainer
