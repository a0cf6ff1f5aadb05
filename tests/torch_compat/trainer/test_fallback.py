"""From compiled steps to eager ones in the middle of an epoch."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanMetric

from torch_compat.trainer.execution.fallback import share_rows
from torch_compat.trainer.states import RunningStage
from torch_compat.utilities.exceptions import MisconfigurationException


def test_rows_that_processes_have_kept_make_it_too_late() -> None:
    for stage in (RunningStage.TRAINING, None):
        with pytest.raises(
            MisconfigurationException,
            match=r"net.py:7 branches\n.*too late to go on eagerly: training_step has .* Set XLATRAIN_EXECUTOR=eager",
        ):
            share_rows({"training_step"}, {}, stage, "net.py:7 branches")
    with pytest.raises(MisconfigurationException, match="training_step and validation_step has"):
        share_rows({"training_step", "validation_step"}, {}, RunningStage.VALIDATING, "net.py:7 branches")


def test_rows_of_other_loops_and_of_predictions_do_not() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

    net = Net()
    net.mean.update(3.0)
    share_rows({"training_step"}, {"self": net}, RunningStage.TESTING, "")
    share_rows({"predict_step"}, {"self": net}, RunningStage.PREDICTING, "")
    assert net.mean.compute() == 3.0  # gathered from all processes, here one
