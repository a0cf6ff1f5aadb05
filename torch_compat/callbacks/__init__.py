"""Callbacks: behaviour around a run that is neither the module's nor the loop's."""

from __future__ import annotations

from torch_compat.callbacks.batch_size_finder import BatchSizeFinder
from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.checkpoint import Checkpoint
from torch_compat.callbacks.corruption_check import SilentDataCorruptionCheck
from torch_compat.callbacks.device_stats_monitor import DeviceStatsMonitor
from torch_compat.callbacks.early_stopping import EarlyStopping
from torch_compat.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from torch_compat.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from torch_compat.callbacks.lambda_function import LambdaCallback
from torch_compat.callbacks.lr_finder import LearningRateFinder
from torch_compat.callbacks.lr_monitor import LearningRateMonitor
from torch_compat.callbacks.model_checkpoint import ModelCheckpoint
from torch_compat.callbacks.model_summary import ModelSummary
from torch_compat.callbacks.non_finite_guard import NonFiniteGuard
from torch_compat.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from torch_compat.callbacks.prediction_writer import BasePredictionWriter
from torch_compat.callbacks.progress import ProgressBar, RichProgressBar, TQDMProgressBar
from torch_compat.callbacks.pruning import ModelPruning
from torch_compat.callbacks.rich_model_summary import RichModelSummary
from torch_compat.callbacks.spike import SpikeDetection
from torch_compat.callbacks.stochastic_weight_avg import StochasticWeightAveraging
from torch_compat.callbacks.throughput_monitor import ThroughputMonitor
from torch_compat.callbacks.tiered_checkpoint import TieredCheckpoint
from torch_compat.callbacks.timer import Timer
from torch_compat.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "Checkpoint",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "NonFiniteGuard",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "SilentDataCorruptionCheck",
    "SpikeDetection",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "TieredCheckpoint",
    "Timer",
    "WeightAveraging",
]
