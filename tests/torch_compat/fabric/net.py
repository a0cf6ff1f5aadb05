"""The module that Fabric's tests train, on a mesh and without one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_compat.fabric import Fabric

X = torch.linspace(-1, 1, 48).reshape(16, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
        self.scale = 1.0
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, keep: bool = False) -> Tensor:
        h = self.first(x).relu()
        if keep:
            self.kept.append(h)
        return self.last(h) * self.scale

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def on(devices: int = 8, **options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=devices, **options)
    fabric.launch()
    return fabric


def ready(fabric: Fabric, kind: Any = torch.optim.Adam, **options: Any) -> tuple[Any, Any]:
    module = net()
    return fabric.setup(module, kind(module.parameters(), **options))


def plain(kind: Any = torch.optim.Adam, **options: Any) -> tuple[Net, Any]:
    module = net()
    return module, kind(module.parameters(), **options)


def close(one: Any, other: Any) -> None:
    """Weights, or gradients, of two modules agree."""
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-4, atol=2e-6, msg=name)
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-4, atol=2e-6, msg=f"gradient of {name}")
