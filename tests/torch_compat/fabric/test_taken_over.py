"""A second Fabric of a module takes the graphs and programs of its calls that the first has made, where they still hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_compat.fabric import Fabric


class Net(torch.nn.Module):
    """A net whose call uses what can change between two Fabrics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        self.scale = 1.0
        self.offset = torch.zeros(2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.first(rows).relu()) * self.scale + self.offset


ROWS = torch.arange(8.0 * 4).reshape(8, 4) / 30


def trained(net: Net, **options: object) -> tuple[list[float], tuple[int, int, int]]:
    """Losses of three steps in a Fabric of their own; graphs made, programs, and those that an earlier Fabric had compiled."""
    fabric = Fabric(**{"accelerator": "cpu", "devices": 1, **options})  # pyright: ignore[reportArgumentType]
    fabric.launch()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(ROWS).square().mean()
        fabric.backward(loss)
        optimizer.step()
        losses.append(float(loss))
    log = fabric._model.steps.log
    fabric._model.release()
    return losses, (log.captures, log.variants, log.taken)


def in_torch(net: Net) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(ROWS).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def twins() -> tuple[Net, Net]:
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    return net, twin


def test_another_fabric_takes_forward_and_backward() -> None:
    net, twin = twins()
    assert trained(net)[1] == (2, 2, 0)
    losses, log = trained(net)
    assert log == (0, 2, 2)
    in_torch(twin)
    assert losses == pytest.approx(in_torch(twin), rel=1e-5)


def scale(net: Net) -> None:
    net.scale = 2.0


def shift(net: Net) -> None:
    net.offset.add_(1.0)


def freeze(net: Net) -> None:
    net.first.weight.requires_grad_(False)


def hook(net: Net) -> None:
    def doubled(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    net.first.register_forward_hook(doubled)


def widen(net: Net) -> None:
    net.last = torch.nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        net.last.weight.fill_(0.1)


@pytest.mark.parametrize("change", [scale, shift, freeze, hook, widen])
def test_what_was_edited_is_not_taken(change: Callable[[Net], None]) -> None:
    net, twin = twins()
    trained(net)
    in_torch(twin)
    for one in (net, twin):
        change(one)
    losses, log = trained(net)
    assert losses == pytest.approx(in_torch(twin), rel=1e-5)
    assert log[2] < log[1]


def test_another_mesh_takes_graphs_alone() -> None:
    net = Net()
    trained(net)
    assert trained(net, devices=2)[1] == (0, 2, 0)
