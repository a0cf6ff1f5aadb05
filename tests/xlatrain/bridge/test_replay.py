"""A graph that is made from a recorded run is the one that is made as the run goes on."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn
from torch.fx.node import map_arg
from torch.utils.checkpoint import checkpoint

from tests.wrapped import Wrapped
from xlatrain.bridge.capture.attention import fused_attention
from xlatrain.bridge.capture.capture import Capture, capture, record
from xlatrain.bridge.capture.op_log import OpLog
from xlatrain.bridge.capture.recorded import kinds
from xlatrain.bridge.capture.recorded.replay import Replay
from xlatrain.bridge.capture.recorded.tape import NotRecordable, is_written
from xlatrain.bridge.capture.rematerialization import kept_recomputation
from xlatrain.bridge.capture.tracebacks import in_backward

DEPTH, WIDTH = 3, 8


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.saved_tensors[0].exp()


class Block(nn.Module):
    def __init__(self, function: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def normalised(block: Block, y: Tensor) -> Tensor:
    return y + block.dropout(F.relu(block.norm(y), inplace=True))


def written(block: Block, y: Tensor) -> Tensor:
    """In place, through views, before and after they are used; next to memory that nothing writes to."""
    z, rest = torch.empty_like(y), torch.tanh(y)
    flat = z.view(-1)
    z.copy_(y).clamp_(min=0)
    z[:, 1:3] = y[:, :2]
    z.t()[0].mul_(2.0)
    y = y + rest + flat.mean() + (rest * 2).as_strided((4, 8), (8, 1))
    y.data = y.data * 2
    return y + z


def drawn(block: Block, y: Tensor) -> Tensor:
    y = y + torch.rand_like(y) * torch.randn(WIDTH) + torch.empty(WIDTH).uniform_() + torch.bernoulli(y.sigmoid())
    q = block.dropout(y).view(1, 2, 4, 4).bfloat16()
    return y + F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True).float().reshape(4, WIDTH)


OUTSIDE = torch.arange(WIDTH) % 2 == 0


def constant(block: Block, y: Tensor) -> Tensor:
    like = torch.zeros_like(OUTSIDE, dtype=torch.float32).masked_fill_(OUTSIDE, -1.0)
    like[1:3] += y.mean(0)[:2]
    y = y + like
    scaled = y * torch.tensor([1.0, 2.0] * 4) + torch.zeros(WIDTH) + torch.arange(WIDTH) * torch.tensor(3).item()
    with torch.autocast("cpu", torch.bfloat16):
        return Exponential.apply(scaled) + block.linear(y).float()  # pyright: ignore[reportOperatorIssue]


BLOCKS = (normalised, written, drawn, constant)


def halved(module: nn.Module, inner: Any, outer: Any) -> Any:
    return (None if inner[0] is None else inner[0] * 0.5,)


def hooked(function: Callable[[Block, Tensor], Tensor]) -> nn.ModuleList:
    torch.manual_seed(0)
    blocks = [Block(function) for _ in range(DEPTH)]
    blocks[2].linear.weight = blocks[0].linear.weight  # tied
    for layer in blocks:
        layer.linear.register_forward_hook(lambda module, args, result: result * 2)
        layer.linear.register_full_backward_hook(halved)
    return nn.ModuleList(blocks)


def step_of(layers: nn.ModuleList, again: bool, digests: list[str]) -> Callable[..., Any]:
    def step(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Any:
        values = {name: value.detach().requires_grad_() for name, value in params.items()}
        with (
            OpLog([*params.values(), *buffers.values(), x]) as log,
            nn.utils.stateless._reparametrize_module(layers, {**values, **buffers}, tie_weights=True),
        ):
            y = x
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=False) if again else layer(y)
            loss = y.square().mean()
            result = loss, torch.autograd.grad(loss, list(values.values()), allow_unused=True), dict(layers.named_buffers())
            digests.append(log.digest(result))
        return result

    return step


def described(made: Capture) -> list[Any]:
    found = []
    for node in made.graph.graph.nodes:
        values = node.meta.get("val")
        tensors = values if isinstance(values, tuple | list) else [values]
        looks = [(t.shape, t.dtype, t.stride()) for t in tensors if isinstance(t, Tensor)]
        found.append((node.name, looks, made.user_line(node), in_backward(node)))
    return found


CASES = [(function, False) for function in BLOCKS] + [(function, True) for function in (normalised, drawn)]


@pytest.mark.parametrize(("function", "again"), CASES, ids=[f"{one.__name__}{' again' * again}" for one, again in CASES])
def test_the_graph_of_a_recording_is_that_of_the_run(
    function: Callable[[Block, Tensor], Tensor], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, digests = hooked(function), []
    step = step_of(layers, again, digests)
    args = dict(layers.named_parameters()), dict(layers.named_buffers()), torch.zeros(4, WIDTH)
    long_way: list[Any] = []
    run = Replay._run
    monkeypatch.setattr(Replay, "_run", lambda self, entry: (long_way.append(entry), run(self, entry))[1])
    with kept_recomputation(), fused_attention():
        usual, recorded = capture(step, *args), record(step, *args).graph()
        first = len(long_way)
        another = record(step, *args).graph()  # which has sketches of the first one
    for made in (recorded, another):
        assert made.code == usual.code
        assert described(made) == described(usual)
        assert (made.inputs, made.outputs, made.uses_random) == (usual.inputs, usual.outputs, usual.uses_random)
    assert len(digests) == 3 and len(set(digests)) == 1
    nodes = [node for node in recorded.graph.graph.nodes if node.op == "call_function"]
    assert len(long_way) - first < first < len(nodes)


def test_layers_that_are_alike_take_the_long_way_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    run = Replay._run
    for depth in (4, 12):
        monkeypatch.setattr(kinds, "_shared", kinds.KindTable())
        long_way: list[Any] = []
        monkeypatch.setattr(Replay, "_run", lambda self, entry, found=long_way: (found.append(entry), run(self, entry))[1])
        layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth))
        params, x = dict(layers.named_parameters()), torch.zeros(2, 3, WIDTH)
        record(step_of(layers, False, []), params, {}, x).graph()
        counts.append(len(long_way))
    assert counts[0] == counts[1]


def test_an_op_that_somebody_gives_a_function_in_python_takes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_shared", kinds.KindTable())
    long_way: list[Any] = []
    run = Replay._run
    monkeypatch.setattr(Replay, "_run", lambda self, entry: (long_way.append(entry.facts.func), run(self, entry))[1])
    sine, key = torch.ops.aten.sin.default, torch._C.DispatchKey.CompositeImplicitAutograd
    for given, expected in (({}, 1), ({}, 1), ({key: torch.sin}, 2), ({}, 2)):
        with monkeypatch.context() as changed:
            for name, function in given.items():
                changed.setitem(sine.py_kernels, name, function)
            record(torch.sin, torch.zeros(3)).graph()
        assert long_way.count(sine) == expected


def test_what_is_more_than_ops_on_plain_tensors_is_not_recorded() -> None:
    with pytest.raises(NotRecordable, match=r"aten\.mul"):
        record(lambda x: Wrapped(x) * 2, torch.zeros(3))


def caught(x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        x = Wrapped(x) * 2
    return x


def swapped(x: Tensor) -> Tensor:
    y, z = x * 2, x * 3
    torch.utils.swap_tensors(y, z)
    return y + 1


def read(x: Tensor) -> Tensor:
    return x * float(x.sum())


@pytest.mark.parametrize(("step", "reason"), [(caught, r"aten\.mul"), (swapped, "swap"), (read, "_local_scalar_dense")])
def test_what_goes_wrong_in_a_recording_is_left_to_another_capture(step: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(NotRecordable, match=reason):
        record(step, torch.zeros(3)).graph()


def negated(x: Tensor) -> Tensor:
    """A lazy negation looks like any other tensor."""
    values = torch.complex(x, x + 1)
    return sum((one.imag.view(8, 4).t().reshape(4, 8) * 2 for one in (values, values.conj())), x)


def forward_mode(x: Tensor) -> Tensor:
    """So do zeros that are none in memory."""
    return torch.func.hessian(lambda one: (one**3).sum())(x[0]) + torch.func.jacfwd(lambda one: one.sin() * one)(x[0])


def reshaped(x: Tensor) -> Tensor:
    with torch.profiler.record_function("name"):
        return x + (x[0] @ x.t())[:, None]  # squeezed in place, by torch


def quantile(x: Tensor) -> Tensor:
    return x + torch.quantile(x, 0.5)  # this too


_can_capture_quantile = pytest.mark.skipif(
    Version(torch.__version__).release < (2, 12), reason="torch 2.11's quantile compares values of tensors"
)


@pytest.mark.parametrize("function", [negated, forward_mode, reshaped, pytest.param(quantile, marks=_can_capture_quantile)])
def test_tensors_are_recorded_as_what_they_are(function: Callable[[Tensor], Tensor]) -> None:
    def step(x: Tensor) -> Tensor:
        with OpLog([x]):
            return function(x)

    x = torch.zeros(4, WIDTH)
    usual, recorded = capture(step, x), record(step, x).graph()
    assert ops_of(recorded) == ops_of(usual)


def ops_of(made: Capture) -> list[Any]:
    """The graph without names, which count what was dropped too."""
    nodes = [node for node in made.graph.graph.nodes if "_record_function" not in node.name]
    numbers = {node: i for i, node in enumerate(nodes)}
    return [(str(one.target), map_arg((one.args, one.kwargs), numbers.__getitem__)) for one in nodes if one.op != "placeholder"]


def test_statistics_that_are_only_used_are_not_written() -> None:
    found = []

    def step(x: Tensor, *statistics: Tensor) -> Tensor:
        y = F.batch_norm(x, statistics[0], statistics[1], training=False)
        y = y + F.batch_norm(x, statistics[2], statistics[3], training=True) + statistics[4].as_strided((1, WIDTH), (WIDTH, 1))
        found.extend(map(is_written, statistics))
        return y

    record(step, torch.zeros(4, WIDTH), *(torch.ones(WIDTH) for _ in range(5))).graph()
    assert found == [False, False, True, True, False]


def test_callbacks_of_the_garbage_collector_are_no_part_of_a_capture() -> None:
    seen: list[bool] = []
    in_step = [False]

    def callback(phase: str, info: dict[str, int]) -> None:
        seen.append(in_step[0])

    def step(x: Tensor) -> Tensor:
        in_step[0] = True
        gc.collect()
        in_step[0] = False
        return x.sin()

    gc.callbacks.append(callback)
    try:
        for trace in (capture, record):
            trace(step, torch.ones(2))
            assert not any(seen)
        step(torch.ones(2))
        assert any(seen)
    finally:
        gc.callbacks.remove(callback)
