"""The loops under stock's names. API: ``lightning.pytorch.loops``; the loops themselves are in :mod:`torch_compat.trainer`."""

from __future__ import annotations

from dataclasses import dataclass

from torch_compat.loops.optimization import _AutomaticOptimization, _ManualOptimization
from torch_compat.trainer.epoch_loop import TrainingEpochLoop as _TrainingEpochLoop
from torch_compat.trainer.evaluation_loop import EvaluationLoop as _EvaluationLoop
from torch_compat.trainer.fit_loop import FitLoop as _FitLoop
from torch_compat.trainer.loop import Loop as _Loop
from torch_compat.trainer.prediction_loop import PredictionLoop as _PredictionLoop

__all__ = [
    "_AutomaticOptimization",
    "_EvaluationLoop",
    "_FitLoop",
    "_Loop",
    "_ManualOptimization",
    "_PredictionLoop",
    "_TrainingEpochLoop",
]


@dataclass
class RestartStage:
    """The point at which a run continued from a checkpoint: the values of stock's three enumerations of this name."""

    NONE = "none"
    RESTARTED_ON_EPOCH_START = "restarted_on_epoch_start"
    RESTARTED_MID_EPOCH = "restarted_mid_epoch"
    RESTARTED_ON_EPOCH_END = "restarted_on_epoch_end"
    RESUMED_ON_EPOCH_END = "resumed_on_epoch_end"
    RESTARTED_ON_TRAIN_BATCH_END = "restarted_on_train_batch_end"
    RESTARTED_ON_LAST = "restarted_on_last"
    RESTARTED_MID_EVALUATION = "restarted_mid_evaluation"
