"""Random numbers that torch draws in loops of Fabric's, also where a call of a module fails or cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from draws_models import place, rows, seed
from raw_loops import as_it_is, compiled, fabric_of, finish, note_loss
from recording import Run, case
from torch import Tensor, nn


def loop(run: Run, how: Callable[..., Any]) -> None:
    fabric = fabric_of(run)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2))
    run.initialise(net)
    seed()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), 1e-2))
    loader = fabric.setup_dataloaders(run.loader(*rows(), shuffle=True))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)) + F.dropout(model(x), 0.5), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run_step = how(fabric, step)
    for _ in range(2):
        for x, y in loader:
            note_loss(run, fabric, run_step(x, y))
            run.record["hooks"].append(place())
        with torch.no_grad():
            run.note("evaluated", model(rows(8)[0]))
    finish(run, net=net)


@case
def fabric_loop(run: Run) -> None:
    loop(run, as_it_is)


@case
def fabric_loop_compiled(run: Run) -> None:
    loop(run, compiled)


class Refusing(nn.Sequential):
    """Counts its calls, draws, and raises for batches of some size."""

    def __init__(self, size: int) -> None:
        super().__init__(nn.Linear(8, 2))
        self.size, self.calls = size, 0
        self.seen: list[int] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.seen.append(len(x))
        dropped = F.dropout(x, 0.5)
        if len(x) == self.size:
            raise ValueError("a batch of another size")
        return super().forward(dropped)


def loop_that_skips(run: Run, how: Callable[..., Any]) -> None:
    fabric = fabric_of(run)
    net = Refusing(3)
    run.initialise(net)
    seed()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 1e-1))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run_step = how(fabric, step)
    x, y = rows(20)
    for size in (4, 4, 3, 4, 3, 4):
        try:
            note_loss(run, fabric, run_step(x[:size], y[:size]))
        except ValueError as error:
            run.record["losses"].append(str(error))
        run.record["hooks"].append([place(), net.calls, list(net.seen), float(net.count)])
    finish(run, net=net)


@case
def fabric_loop_that_skips_batches_that_raise(run: Run) -> None:
    loop_that_skips(run, as_it_is)


@case
def fabric_loop_that_skips_batches_that_raise_compiled(run: Run) -> None:
    loop_that_skips(run, compiled)


@case
def a_call_that_cannot_be_compiled_after_one_that_can(run: Run) -> None:
    """The backward pass of the first comes when the modules have left the mesh."""

    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(F.dropout(x, 0.3))
            return found * 2 if float(found.sum()) > 0 and len(x) > 5 else found

    fabric = fabric_of(run)
    first, last = nn.Linear(8, 4), Asking(4, 2)
    run.initialise(nn.ModuleList([first, last]))
    seed()
    model, head = fabric.setup_module(first), fabric.setup_module(last)
    optimizer = fabric.setup_optimizers(torch.optim.SGD([*first.parameters(), *last.parameters()], 1e-1))
    x, y = rows(24)
    for size in (4, 4, 6, 6):
        hidden = model(F.dropout(x[:size], 0.2))
        loss = F.mse_loss(head(hidden), y[:size])
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        note_loss(run, fabric, loss)
        run.record["hooks"].append(place())
    finish(run, first=first, last=last)


class Bits(torch.autograd.Function):
    """Its backward pass reads 64 bits as a whole number, which XLA cannot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return grad * torch.where(x.double().view(torch.int64) >= 0, 1.0, 2.0)


@case
def a_backward_pass_that_cannot_be_lowered(run: Run) -> None:
    """The call before it has counted, and has drawn."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 2)
            self.norm, self.calls = nn.BatchNorm1d(2), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return Bits.apply(F.dropout(self.norm(super().forward(x)), 0.3))  # pyright: ignore[reportReturnType]

    fabric = fabric_of(run)
    net = Counting()
    run.initialise(net)
    seed()
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), 1e-1))
    x, y = rows(16)
    for _ in range(3):
        loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        note_loss(run, fabric, loss)
        run.record["hooks"].append([place(), net.calls])
    finish(run, net=net)
