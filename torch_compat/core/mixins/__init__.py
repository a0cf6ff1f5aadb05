"""``lightning.pytorch.core.mixins``."""

from __future__ import annotations

from torch_compat.core.hparams import HyperparametersMixin

__all__ = ["HyperparametersMixin"]
