"""Small models and data for tests, bug reports and demonstrations (``lightning.pytorch.demos``)."""

from __future__ import annotations

from torch_compat.demos.boring_classes import BoringDataModule, BoringModel, DemoModel

__all__ = ["BoringDataModule", "BoringModel", "DemoModel"]
