"""Loggers as ``lightning.fabric.loggers`` has them: the Trainer's are subclasses of theirs in stock, and have more."""

from __future__ import annotations

from torch_compat.fabric.loggers.csv_logs import CSVLogger
from torch_compat.fabric.loggers.logger import Logger
from torch_compat.fabric.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]
