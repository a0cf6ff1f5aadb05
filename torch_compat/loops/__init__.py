"""The loops under stock's names. API: ``lightning.pytorch.loops``; the loops themselves are in :mod:`torch_compat.trainer`."""

from __future__ import annotations

from enum import Enum

from torch_compat.loops.progress import _BatchProgress
from torch_compat.refused import refusing
from torch_compat.trainer.epoch_loop import TrainingEpochLoop as _TrainingEpochLoop
from torch_compat.trainer.evaluation_loop import EvaluationLoop as _EvaluationLoop
from torch_compat.trainer.fit_loop import FitLoop as _FitLoop
from torch_compat.trainer.loop import Loop as _Loop
from torch_compat.trainer.prediction_loop import PredictionLoop as _PredictionLoop

__all__ = [
    "_BatchProgress",
    "_EvaluationLoop",
    "_FitLoop",
    "_Loop",
    "_PredictionLoop",
    "_TrainingEpochLoop",
]
