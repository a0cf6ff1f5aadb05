"""Finders of learning rate and batch size."""

from __future__ import annotations

from torch_compat.tuner.tuning import Tuner

__all__ = ["Tuner"]
