"""Layers that look at the whole batch. API: ``lightning.pytorch.plugins.layer_sync``."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class LayerSync(ABC):
    """Changes layers before a run and back after it; called once each, on the host, before parameters are placed."""

    @abstractmethod
    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with its layers changed, in place or not."""

    @abstractmethod
    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model as it was before :meth:`apply`."""


class TorchSyncBatchNorm(LayerSync):
    """Synchronised BatchNorm. It changes nothing: a compiled step normalises over the global batch, as ``SyncBatchNorm`` does."""

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        return model
