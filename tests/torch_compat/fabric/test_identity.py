"""Modules, copies and functions of one name: each is itself, in any order of calls, as in plain torch."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torch_compat.fabric.net import close, on
from torch_compat.fabric import Fabric

X = torch.linspace(-1, 1, 32).reshape(8, 4)
FACTOR = 2.0


class Part(nn.Module):
    """A module of which there are many; ``width`` makes some of other sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 2 + seed % 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y if self.training else y.tanh()

    def score(self, x: Tensor) -> Tensor:
        return self(x).square().mean() * FACTOR


def _step(module: Any, optimizer: Any, backward: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (module(x) - 1).square().mean()
        backward(loss)
        optimizer.step()
        return loss.detach()

    return step


@dataclass
class World:
    """The same modules with Fabric and without; ``parts[i]`` is ``(module, optimizer, step, compiled step)`` of each."""

    fabric: Fabric
    parts: list[list[Any]] = field(default_factory=list)

    def add(self, ours: Any, theirs: nn.Module) -> None:
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.3, momentum=0.5) for one in (ours, theirs)]
        if isinstance(ours, Part):
            ours, optimizers[0] = self.fabric.setup(ours, optimizers[0])
        else:  # a copy, which is set up
            optimizers[0] = self.fabric.setup_optimizers(optimizers[0])
        ours.mark_forward_method("score")
        mine = _step(ours, optimizers[0], self.fabric.backward)
        its = _step(theirs, optimizers[1], lambda loss: loss.backward())
        self.parts.append([ours, theirs, mine, its, self.fabric.compile(mine)])

    def same(self, one: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-4, atol=1e-5)

    def act(self, action: str, part: list[Any], other: list[Any]) -> None:
        ours, theirs, mine, its, compiled = part
        if action == "train":
            self.same(mine(X), its(X))
        elif action == "compiled":
            self.same(compiled(X), its(X))
        elif action == "look":
            with torch.no_grad():
                self.same(ours(X), theirs(X))
        elif action == "score":
            with torch.no_grad():
                self.same(ours.score(X), theirs.score(X))
        elif action == "turn":
            for one in (ours, theirs):
                one.train(not one.training)
        elif action == "freeze":
            for one in (ours, theirs):
                one.layer.weight.requires_grad_(not one.layer.weight.requires_grad)
        elif action == "load" and ours.layer.weight.shape == other[0].layer.weight.shape:
            ours.load_state_dict(other[0].state_dict())
            theirs.load_state_dict(other[1].state_dict())


@pytest.mark.parametrize("seed", [0, 1])
def test_modules_of_one_class_in_any_order(seed: int) -> None:
    """Their own calls, methods, modes and steps of one name; copies of them; and what comes where another has gone."""
    draw = random.Random(seed)
    world = World(on(1))
    for number in range(3):
        world.add(Part(number), Part(number))
    for round_ in range(3):
        for action in draw.choices(["train", "compiled", "look", "score", "turn", "load", "freeze"], k=12):
            world.act(action, draw.choice(world.parts), draw.choice(world.parts))
        if round_ == 0:
            ours, theirs = world.parts[0][:2]
            world.add(copy.deepcopy(ours), copy.deepcopy(theirs))
        elif round_ == 1:
            gone = weakref.ref(world.parts.pop(1)[0])
            world.add(Part(7), Part(7))
            gc.collect()
            assert gone() is None
    for ours, theirs, *_ in world.parts:
        close(ours, theirs)
    assert not world.fabric._model.on_host


@pytest.mark.parametrize("alone", [True, False])
def test_an_optimizer_of_what_belongs_to_no_module(alone: bool) -> None:
    """The temperature of a policy, alone or with the policy's parameters: in plain torch, beside what is on the mesh."""
    fabric = on(1)
    found = []
    for kind in ("ours", "plain"):
        part: Any = Part(0)
        temperature = nn.Parameter(torch.tensor(0.5))
        optimizer: Any = torch.optim.Adam([temperature, *([] if alone else part.parameters())], lr=0.1)
        if kind == "ours":
            part, optimizer = fabric.setup_module(part), fabric.setup_optimizers(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            loss = (part(X).square() * temperature.exp()).mean()
            fabric.backward(loss) if kind == "ours" else loss.backward()
            optimizer.step()
        found.append((part, temperature.detach()))
    torch.testing.assert_close(found[0][1], found[1][1])
    if not alone:
        close(found[0][0], found[1][0])


def test_a_module_that_nobody_has_any_more_is_let_go() -> None:
    """When another is set up: what is on the mesh together is laid out together."""
    fabric = on(1)
    kept = fabric.setup(Part(0))
    with torch.no_grad():
        kept(X)
    found = []
    for number in range(4):
        part = Part(number)
        module, optimizer = fabric.setup(part, torch.optim.SGD(part.parameters(), lr=0.1))
        fabric.backward(module(X).mean())
        optimizer.step()
        found.append(weakref.ref(part))
        del part, module, optimizer
    gc.collect()
    last = fabric.setup(Part(9))
    gc.collect()
    assert [one() for one in found] == [None] * 4
    last(X), kept(X)
    assert len(fabric._model.steps.model.params) == 4


def test_programs_go_with_the_function_that_they_belong_to() -> None:
    fabric = on(1)
    part = Part(0)
    module, optimizer = fabric.setup(part, torch.optim.SGD(part.parameters(), lr=0.1))
    logs: list[list[Tensor]] = [[], []]

    def made(log: list[Tensor]) -> Any:
        @fabric.compile
        def step(x: Tensor) -> None:
            loss = module(x).square().mean()
            fabric.backward(loss)
            log.append(loss.detach())
            optimizer.zero_grad()

        return step

    first, second = made(logs[0]), made(logs[1])
    for step in (first, second, first, second, second):
        step(X)
    assert [len(log) for log in logs] == [2, 3]
    variants = fabric._model.steps._variants._steps
    assert len(variants) >= 2
    del first, second, step
    gc.collect()
    with torch.no_grad():
        module(X)
    assert len(variants) == 1
