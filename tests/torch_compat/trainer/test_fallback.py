"""From compiled steps to eager ones in the middle of an epoch."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanMetric

from tests.torch_compat.strategies.small import Net, trained, weights
from torch_compat.run.states import RunningStage
from torch_compat.step.eager.fallback import share_rows
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
    class Averaging(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

    net = Averaging()
    net.mean.update(3.0)
    share_rows({"training_step"}, {"self": net}, RunningStage.TESTING, "")
    share_rows({"predict_step"}, {"self": net}, RunningStage.PREDICTING, "")
    assert net.mean.compute() == 3.0  # gathered from all processes, here one


def test_torchscript_in_a_module_runs_eagerly_and_is_named() -> None:
    scripted = Net()
    scripted.net = torch.jit.trace(scripted.net, torch.zeros(2, 4))  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.warns(UserWarning, match=r"(?s)run eagerly on one CPU.*self\.net is a TorchScript module.*script it after fit"):
        trained(scripted)
    torch.testing.assert_close(weights(scripted), weights(trained()))


def test_a_part_given_to_torch_compile_is_part_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    compiled = Net()
    compiled.net.forward = torch.compile(compiled.net.forward)
    torch.testing.assert_close(weights(trained(compiled)), weights(trained()))
