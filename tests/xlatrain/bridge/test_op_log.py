"""A rehearsal without a graph tells what a second capture would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from xlatrain.bridge.capture.capture import capture, record, rehearse
from xlatrain.bridge.capture.op_log import OpLog, argument_text
from xlatrain.bridge.capture.recorded.tape import NotRecordable
from xlatrain.bridge.errors import CaptureError

Function = Callable[..., Any]


class Logged:
    """``fn`` and the digest of its last run."""

    def __init__(self, fn: Function) -> None:
        self.fn = fn
        self.digest = ""

    def __call__(self, *tensors: torch.Tensor) -> Any:
        with OpLog(tensors) as log:
            result = self.fn(*tensors)
            self.digest = log.digest(result)
        return result


def digests(fn: Function, *args: torch.Tensor) -> list[str]:
    """The digests of a capture and of rehearsals, as it runs and recorded."""
    logged, found = Logged(fn), []
    for run in (capture, rehearse, record):
        run(logged, *args)
        found.append(logged.digest)
    return found


def with_gradient(loss: Function) -> Function:
    def gradient(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(loss(x), [x])

    return gradient


def normalised(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True).square().sum()


def written(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(3, 4)
    y[:, :2] = x[:, :2] * torch.tensor([2.0, 3.0])
    y.t()[0].add_(x[:, 3])
    return y.sum()


def half(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.T).float().sum()


LSTM = nn.LSTM(4, 5).requires_grad_(False)

PURE: dict[str, Function] = {
    "dropout": lambda x: F.dropout(x, 0.5).sum(),
    "batch_norm": normalised,
    "in-place on views": written,
    "autocast": half,
    "checkpoint": lambda x: checkpoint(lambda v: F.dropout(v, 0.1).exp(), x, use_reentrant=False).sum(),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3, is_causal=True).sum(),
    "LSTM": lambda x: LSTM(x)[0].sum(),
    "double backward": lambda x: torch.autograd.grad(x.pow(3).sum(), [x], create_graph=True)[0].pow(2).sum(),
}


@pytest.mark.parametrize("name", PURE)
def test_what_stays_the_same_has_the_same_digest(name: str) -> None:
    assert len(set(digests(with_gradient(PURE[name]), torch.randn(3, 4)))) == 1


class Counter:
    """A host value that changes from run to run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def hooked(x: torch.Tensor, count: Counter) -> torch.Tensor:
    y = x * 2
    factor = count()
    y.register_hook(lambda grad: grad * factor)
    return y.sum()


IMPURE: dict[str, Callable[[torch.Tensor, Counter], torch.Tensor]] = {
    "a number": lambda x, count: (x * count()).sum(),
    "another op": lambda x, count: (x.sin() if count() % 2 else x.cos()).sum(),
    "another shape": lambda x, count: x[: count()].sum(),
    "one more op": lambda x, count: sum((x.sum() for _ in range(count())), start=x.new_zeros(())),
    "another operand": lambda x, count: (lambda a, b: (a if count() % 2 else b).exp().sum())(x.sin(), x.cos()),
    "in a gradient hook": hooked,
    "a dtype": lambda x, count: x.to(torch.bfloat16 if count() % 2 else torch.float16).float().sum(),
}


@pytest.mark.parametrize("name", IMPURE)
def test_what_changes_has_another_digest(name: str) -> None:
    count = Counter()
    captured, rehearsed, recorded = digests(with_gradient(lambda x: IMPURE[name](x, count)), torch.randn(3, 4))
    assert captured != rehearsed != recorded


def test_another_tensor_returned_has_another_digest() -> None:
    count = Counter()
    captured, rehearsed, recorded = digests(lambda x: (x.sin(), x.cos())[count() % 2], torch.randn(3))
    assert captured != rehearsed != recorded


def test_a_rehearsal_refuses_what_a_capture_refuses() -> None:
    with pytest.raises(CaptureError, match=r"test_op_log.py:\d+: (?s:.*)reads the value of a tensor"):
        rehearse(lambda x: x if x.sum() > 0 else -x, torch.randn(3))


def shared(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0).set_(x.untyped_storage(), 0, (3,), (1,)) * 2


def shared_copy(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0).set_(x.untyped_storage().clone(), 0, (3,), (1,)) * 2


def of_a_generator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fn", [shared, shared_copy, of_a_generator, lambda x: copy.deepcopy(x.detach()) * 2])
def test_an_argument_that_is_no_literal_is_refused_and_never_printed(fn: Function) -> None:
    """To print the storage of a fake tensor reads memory that is not there."""
    for run in (capture, record):
        with pytest.raises((RuntimeError, CaptureError, NotRecordable)):
            run(Logged(fn), torch.ones(3))


class Loud:
    def __repr__(self) -> str:
        raise AssertionError("was printed")


@pytest.mark.parametrize("value", [torch.ones(3).untyped_storage(), Loud(), torch.Stream("cpu")])
def test_what_is_in_no_table_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CaptureError, match=rf"aten\.set_ is given a .*{type(value).__name__}"):
        argument_text(value, "aten.set_")


def test_literals_are_told_apart() -> None:
    values = (1, 1.0, True, 1j, "1", None, torch.float32, torch.device("cpu"), torch.strided, torch.preserve_format, 0.0, -0.0)
    assert len({argument_text(value, "an op") for value in values}) == len(values)


def test_a_log_says_whether_it_tells_objects_by_their_ids() -> None:
    def by_identity(fn: Function) -> bool:
        with OpLog(()) as log:
            log.digest(fn())
        return log.by_identity

    assert not by_identity(lambda: torch.zeros(2).sum())
    assert not by_identity(lambda: {"the Generator 1": torch.zeros(2), "name": "the Generator 1"})
    assert by_identity(lambda: torch.rand(2, generator=torch.Generator()))
    assert by_identity(lambda: (torch.zeros(2), torch.relu))
