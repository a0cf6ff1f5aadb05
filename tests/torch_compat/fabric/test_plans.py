"""Fabric follows what its strategy says of where parameters lie and what is computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_compat.fabric import Fabric
from torch_compat.fabric.strategies import MeshStrategy
from torch_compat.utilities.exceptions import MisconfigurationException

X = torch.linspace(-1, 1, 64).reshape(8, 8)
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(fabric: Any, module: nn.Module, compiled: bool) -> list[float]:
    """Losses of three steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if fabric is not None:
        module, optimizer = fabric.setup(module, optimizer)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = fabric.compile(step) if compiled else step
    return [float(run(X)) for _ in range(3)]


@pytest.mark.parametrize("compiled", [False, True], ids=["calls", "compiled"])
def test_plan_recomputation_and_table(
    compiled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recomputed: list[str] = []

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        recomputed.append(type(function.__self__).__name__)
        return checkpoint(function, *args, **kwargs)

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", counted)
    strategy = MeshStrategy(CUBE, min_size=1, tensor_parallel_plan=PLAN, remat=["blocks.*"], show_shardings=True)
    fabric = Fabric(accelerator="cpu", devices=8, strategy=strategy)
    fabric.launch()
    module, alone = Net(), Net()
    assert trained(fabric, module, compiled) == pytest.approx(trained(None, alone, False), rel=2e-6)
    assert not fabric._model.on_host
    assert set(recomputed) == {"Block"}
    placed = fabric._model.placed
    assert placed is not None
    assert tuple(placed.param_shardings["blocks.1.up.weight"].spec) == ("tensor", "fsdp")
    assert tuple(placed.param_shardings["blocks.1.down.weight"].spec) == ("fsdp", "tensor")
    shown = capsys.readouterr().out
    assert "plan given 'blocks.*.up' colwise" in shown and "optimizer state" in shown
    for (name, one), (_, other) in zip(module.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("wrong", [{"remat": ["layers.*"]}, {"tensor_parallel_plan": {"layers.*": "colwise"}}])
def test_what_matches_nothing_is_an_error(wrong: dict[str, Any]) -> None:
    fabric = Fabric(accelerator="cpu", devices=8, strategy=MeshStrategy(CUBE, min_size=1, **wrong))
    fabric.launch()
    with pytest.raises((ValueError, MisconfigurationException), match="'layers"):
        trained(fabric, Net(), False)


class Whitened(torch.optim.Optimizer):
    """Products of gradients, as Shampoo's, with state that is made of them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["rows"], state["columns"] = (torch.zeros(size, size) for size in p.shape)
                state["rows"] = state["rows"] + p.grad @ p.grad.T
                state["columns"] = state["columns"] + p.grad.T @ p.grad
                left, right = (state[side] / state[side].norm() for side in ("rows", "columns"))
                p.sub_(group["lr"] * (left @ p.grad @ right))


def test_an_update_with_products_of_gradients_on_three_axes() -> None:
    """The update is a program of its own, without the gathers that a step has: nothing in it needs them."""
    plan = dict(zip(("0", "2", "4", "6"), ("colwise", "colwise", "rowwise", "rowwise"), strict=True))
    fabric = Fabric(accelerator="cpu", devices=8, strategy=MeshStrategy(CUBE, min_size=16, tensor_parallel_plan=plan))
    fabric.launch()
    weights = []
    for on_mesh in (True, False):
        torch.manual_seed(0)
        sizes = [(32, 64), (64, 32), (32, 64), (64, 32)]
        module: Any = nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size, bias=False), nn.Tanh())))
        optimizer: Any = Whitened(module.parameters())
        x = torch.randn(64, 32)
        net = module
        if on_mesh:
            net, optimizer = fabric.setup(module, optimizer)
        before = [p.detach().clone() for p in module.parameters()]
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in module.parameters()])
        assert all((a - b).abs().max() > 1e-2 for a, b in zip(weights[-1], before, strict=True))
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)  # a wrong product is off by tens of percent
