"""Requests of a ``self.log`` call."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

import pytest
import torch
import torchmetrics
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import warm
from torch_compat.core.logging import HOOKS, LogOptions, check_name, check_value, reduction, resolve
from torch_compat.core.module import LightningModule
from torch_compat.utilities.exceptions import MisconfigurationException


@pytest.mark.parametrize("value", [1, 2.5, True, torch.tensor(1.0), torch.ones(1, 1), torchmetrics.MeanMetric()])
def test_values_that_can_be_logged(value: Any) -> None:
    check_value("name", value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x", r"`self.log\(loss, x\)` was called, but `str` values cannot be logged"),
        ([1], "`list` values cannot be logged"),
        (None, "`NoneType` values cannot be logged"),
        ({"b": 1}, "`dict` values cannot be logged: use `self.log_dict`"),
        ({"b": {"c": 1}}, "nested dictionaries cannot be logged"),
        (torch.ones(2), r"tensor\(\[1., 1.\]\)\)` was called, but the tensor must have a single element.*mean\(\)"),
    ],
)
def test_values_that_cannot(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_value("loss", value)


def test_a_tensor_of_a_captured_step_is_named_by_its_shape() -> None:
    with FakeTensorMode():
        value = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"tensor of shape \(2, 3\) and dtype torch.float32"):
        check_value("loss", value)


def test_names() -> None:
    check_name("loss", add_dataloader_idx=True)
    check_name("loss/dataloader_idx_1", add_dataloader_idx=False)
    with pytest.raises(MisconfigurationException, match="should not contain information about `dataloader_idx`"):
        check_name("loss/dataloader_idx_1", add_dataloader_idx=True)
    with pytest.raises(TypeError, match="expects a string as name, found int: 3"):
        check_name(3, add_dataloader_idx=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("mean", "mean"), ("MAX", "max"), ("avg", "mean"), (torch.sum, "sum"), (min, "min"), (torch.mean, "mean")],
)
def test_reductions(given: Any, expected: str) -> None:
    assert reduction(given) == expected


@pytest.mark.parametrize("given", ["median", 3, lambda values: values[0], []])
def test_custom_reductions_are_refused(given: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"reduce_fx=\{min,max,mean,sum\}.*`torchmetrics\.Metric`"):
        reduction(given)


@pytest.mark.parametrize(
    ("hook", "given", "expected"),
    [
        ("training_step", {}, (True, False)),
        ("training_step", {"on_epoch": True}, (True, True)),
        ("training_step", {"on_step": False, "on_epoch": True}, (False, True)),
        ("validation_step", {}, (False, True)),
        ("validation_step", {"on_step": True}, (True, True)),
        ("on_train_epoch_end", {}, (False, True)),
    ],
)
def test_defaults_by_hook(hook: str, given: dict[str, bool], expected: tuple[bool, bool]) -> None:
    options = resolve(LogOptions(prog_bar=True, **given), hook)
    assert (options.on_step, options.on_epoch) == expected
    assert options.prog_bar


@pytest.mark.parametrize(
    ("hook", "given", "message"),
    [
        ("on_fit_start", {}, r"You can't `self.log\(\)` inside `on_fit_start`"),
        ("on_train_epoch_end", {"on_step": True}, r"`self.log\(on_step=True\)` inside `on_train_epoch_end`.*\(False,\)"),
        ("on_train_start", {"on_epoch": False}, r"on_epoch=False"),
        ("training_step", {"on_step": False}, "is not useful"),
    ],
)
def test_what_a_hook_does_not_allow(hook: str, given: dict[str, bool], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        resolve(LogOptions(**given), hook)


STOCK_TABLE = """
import json
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
print(json.dumps({hook: rules for hook, rules in _FxValidator.functions.items() if rules}))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs the real package")
def test_the_table_of_hooks_is_stocks() -> None:
    result = warm.run(warm.STOCK, ["-c", STOCK_TABLE], env=os.environ, timeout=300)
    assert result.returncode == 0, result.stderr
    stock = json.loads(result.stdout.splitlines()[-1])
    ours = {
        hook: {
            "allowed_on_step": list(rules.allowed_on_step),
            "allowed_on_epoch": list(rules.allowed_on_epoch),
            "default_on_step": rules.default_on_step,
            "default_on_epoch": rules.default_on_epoch,
        }
        for hook, rules in HOOKS.items()
    }
    assert ours == stock


class TestLog:
    def test_without_a_trainer_it_warns(self) -> None:
        with pytest.warns(UserWarning, match="`self.trainer` reference is not registered"):
            LightningModule().log("loss", 1)

    def test_log_dict_takes_a_mapping(self) -> None:
        with pytest.raises(TypeError, match="expects a mapping of names to values, found list"):
            LightningModule().log_dict([1])

    def test_the_attribute_of_a_metric(self) -> None:
        module = LightningModule()
        module.metrics = torchmetrics.MetricCollection([torchmetrics.MeanMetric()])
        metric = module.metrics["MeanMetric"]
        assert module._metric_attribute(metric) == "metrics.MeanMetric"
        with pytest.raises(MisconfigurationException, match=r"metric_attribute=name.*metrics\.MeanMetric"):
            module._metric_attribute(torchmetrics.MeanMetric())
        with pytest.raises(MisconfigurationException, match=r"find the `LightningModule` attribute.*assign it in `__init__`"):
            LightningModule()._metric_attribute(metric)
