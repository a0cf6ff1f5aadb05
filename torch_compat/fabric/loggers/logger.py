"""The base class. API: ``lightning.fabric.loggers.logger``."""

from __future__ import annotations

from torch_compat.loggers.logger import Logger, rank_zero_experiment

__all__ = ["Logger", "rank_zero_experiment"]
