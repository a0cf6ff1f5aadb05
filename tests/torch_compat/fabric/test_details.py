"""Details of Fabric's API as stock has them, and what is refused where several devices share a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.scripted import results_of
from tests.torch_compat.fabric.net import X, net, on
from torch_compat import LightningModule

SCRIPT = Path(__file__).with_name("details_script.py")


def test_details_are_those_of_stock() -> None:
    """Logging through Fabric, copies, warnings, launch, filters, clipping, graphs, optimizers, throughput, registries."""
    stock, ours = results_of(SCRIPT, "lightning"), results_of(SCRIPT, "torch_compat")
    own = {"strategy twice": "ArgumentValueError", "accelerator twice": "ArgumentValueError"}  # of both of stock's classes
    for name, expected in stock.items():
        if name in own:
            assert ours[name].partition(":")[::2] == (own[name], expected.partition(":")[2]), name
        else:
            assert ours[name] == expected, name


class Step(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.layer(batch).square().mean() * (batch_idx + 1)


class Manual(Step):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.layer(batch).square().mean()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


def test_a_step_that_optimizes_itself_need_not_be_marked() -> None:
    losses = []
    for devices in (1, 2):
        module = Manual()
        model, _ = on(devices).setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        losses.append(torch.stack([model.training_step(X, index) for index in range(2)]))
    torch.testing.assert_close(*losses)
    assert losses[0][1] < losses[0][0]


def test_methods_that_call_the_module_are_to_be_marked() -> None:
    """Where several devices share it, as in stock; steps of a LightningModule are."""
    fabric = on(2)
    model, step = fabric.setup(net()), fabric.setup(Step())
    with pytest.raises(RuntimeError, match=r"calling the method `Net.loss\(\)` from outside"):
        model.loss(X)
    assert next(iter(model.parameters())) is next(iter(model.module.parameters()))  # methods of every module
    model.mark_forward_method("loss")
    torch.testing.assert_close(model.loss(X), net().loss(X))
    torch.testing.assert_close(step.training_step(X, 1), Step().training_step(X, 1))
    assert not fabric._model.on_host
