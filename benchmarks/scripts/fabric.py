"""Host time of one step of a raw loop with Fabric: calls of the module, and the step compiled whole, in turn with bare torch.

Runs under stock Lightning too (``python benchmarks/scripts/fabric.py``), where ``compiled`` is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Tensor]


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def bare(width: int) -> Step:
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def with_fabric(width: int, devices: int, *, compiled: bool) -> Step:
    fabric = Fabric(accelerator="cpu", devices=devices)
    fabric.launch()
    module = network(width)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), 1e-3))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return fabric.compile(step) if compiled else step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100, help="of each kind in a round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    steps = {"bare torch": bare(args.width), "calls": with_fabric(args.width, args.devices, compiled=False)}
    if hasattr(Fabric, "compile"):
        steps["compiled"] = with_fabric(args.width, args.devices, compiled=True)
    x, y = torch.randn(args.batch, 32), torch.randn(args.batch, 2)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(args.steps):
                loss = step(x, y)
            loss.item()
            if turn:  # the first compiles
                times[name].append(1e6 * (time.perf_counter() - began) / args.steps)
    print(json.dumps({"median_us": {name: round(statistics.median(found), 1) for name, found in times.items()}}))


if __name__ == "__main__":
    main()
