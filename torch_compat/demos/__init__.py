"""Small models and data for tests, bug reports and demonstrations (``lightning.pytorch.demos``)."""

from __future__ import annotations

from torch_compat.demos.boring_classes import BoringDataModule, BoringModel, DemoModel
from torch_compat.demos.lstm import LightningLSTM, SequenceSampler, SimpleLSTM
from torch_compat.demos.transformer import LightningTransformer, Transformer, WikiText2

__all__ = [
    "BoringDataModule",
    "BoringModel",
    "DemoModel",
    "LightningLSTM",
    "LightningTransformer",
    "SequenceSampler",
    "SimpleLSTM",
    "Transformer",
    "WikiText2",
]
