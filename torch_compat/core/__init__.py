"""LightningModule and LightningDataModule (``lightning.pytorch.core``)."""

from __future__ import annotations

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule

__all__ = ["LightningDataModule", "LightningModule"]
