"""Fabric's compiled steps on a mesh of eight devices: what their Python does, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torch_compat.fabric.net import X, close, on, plain, ready
from torch_compat.loggers import Logger
from torch_compat.utilities.exceptions import MisconfigurationException


class Recording(Logger):
    name = version = "recording"  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append((step, metrics))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


class Counting:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_loss(self, loss: Tensor, i: int) -> None:
        self.seen.append((float(loss), i))


def test_a_compiled_step_does_what_its_python_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers as inputs, plain variables as variants, a gradient penalty, lists, loggers, callbacks, prints; calls in between."""
    logger, callback = Recording(), Counting()
    fabric = on(loggers=logger, callbacks=callback)
    model, optimizer = ready(fabric, lr=0.01)
    same, its = plain(lr=0.01)
    history: list[Tensor] = []
    factor = 0.5

    def loss_of(module: Any, x: Tensor, weight: float) -> Tensor:
        given = x.detach().requires_grad_()
        out = module(given)
        (slope,) = torch.autograd.grad(out.sum(), given, create_graph=True)
        return out.square().mean() * factor + weight * slope.square().mean()

    @fabric.compile
    def step(batch: dict[str, Tensor], i: int, weight: float = 0.1) -> dict[str, Any]:
        loss = loss_of(model, batch["x"], weight * (i + 1))
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.detach())
        if i % 2 == 0:
            fabric.log("loss", loss, step=i)
        fabric.call("on_loss", loss=loss, i=i)
        fabric.print("step", i)
        return {"loss": loss, "i": i}

    expected = []
    for i in range(5):
        factor = 0.5 if i < 3 else 0.25
        out = step({"x": X}, i)
        assert out["i"] == i
        loss = loss_of(same, X, 0.1 * (i + 1))
        expected.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(same.parameters(), 0.5)
        its.step()
        its.zero_grad()
        if i == 2:  # a call in between, differentiated
            fabric.backward(model(X).mean())
            optimizer.step()
            optimizer.zero_grad()
            same(X).mean().backward()
            its.step()
            its.zero_grad()
    assert [loss.item() for loss in history] == pytest.approx(expected, rel=1e-4)
    assert [step for step, _ in logger.logged] == [0, 2, 4]
    assert [found["loss"] for _, found in logger.logged] == pytest.approx(expected[::2], rel=1e-4)
    assert callback.seen == [(pytest.approx(loss, rel=1e-4), i) for i, loss in enumerate(expected)]
    assert capsys.readouterr().out.splitlines() == [f"step {i}" for i in range(5)]
    close(model, same)
    found = fabric._model.steps.log
    assert sum("variable factor" in line for line in found.recompilations) == 1, found.recompilations
    assert optimizer.state_dict()["state"][0]["step"] == its.state_dict()["state"][0]["step"] == 6


def test_a_step_that_cannot_be_captured_runs_uncompiled_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = on()
    model, optimizer = ready(fabric, torch.optim.SGD, lr=0.1)
    same, its = plain(torch.optim.SGD, lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        fabric.backward(loss * 2 if loss.detach().numpy() > 0 else loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with pytest.warns(UserWarning, match=r"test_compiled_step\.py"):
        fabric.compile(step)(X)
    (same(X).square().mean() * 2).backward()
    its.step()
    its.zero_grad()
    close(model, same)
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    fabric = on()
    model, optimizer = ready(fabric, torch.optim.SGD, lr=0.1)
    with pytest.raises(MisconfigurationException, match=r"test_compiled_step\.py"):
        fabric.compile(step)(X)


def test_a_nonlocal_variable_is_refused() -> None:
    fabric = on(1)
    model, _ = ready(fabric, torch.optim.SGD, lr=0.1)
    count = 0

    def step(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return model(x).mean()

    with pytest.warns(UserWarning, match="nonlocal"):
        fabric.compile(step)(X)
    assert count == 1


def test_a_norm_that_is_not_finite_is_an_error() -> None:
    fabric = on(1)
    model, optimizer = ready(fabric, torch.optim.SGD, lr=0.1)

    def step(x: Tensor) -> None:
        fabric.backward(model(x).sum())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)

    for run in (step, fabric.compile(step)):
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="non-finite"):
            run(X * float("inf"))
