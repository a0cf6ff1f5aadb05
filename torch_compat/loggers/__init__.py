"""Experiment loggers: where metrics, hyperparameters and graphs of a run are written."""

from __future__ import annotations

from torch_compat.loggers.comet import CometLogger
from torch_compat.loggers.csv_logs import CSVLogger
from torch_compat.loggers.litlogger import LitLogger
from torch_compat.loggers.logger import Logger
from torch_compat.loggers.mlflow import MLFlowLogger
from torch_compat.loggers.tensorboard import TensorBoardLogger
from torch_compat.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "CometLogger", "LitLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]
