"""``pytorch_lightning.core``."""

from __future__ import annotations

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.legacy.module import LightningModule

__path__: list[str] = []  # submodules are found by the alias finder
__all__ = ["LightningDataModule", "LightningModule"]
