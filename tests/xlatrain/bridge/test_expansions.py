"""Ops that are alike are expanded once: the graph is the one that is made without copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.capture.recorded import expansions
from xlatrain.bridge.capture.recorded.fake_results import NotAlike

DEPTH = 3


class Block(nn.Module):
    """Views, slices, in-place writes, 16-bit numbers, several results, one tensor as both operands, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        y = x + self.dropout(self.out(y.float()))
        y = self.batch_norm(y.transpose(1, 2)).transpose(1, 2)
        z = y.clone()
        z[:, 1:3] = y[:, :2] * y[:, :2]
        z.t_() if z.ndim == 2 else z[..., 0].mul_(2.0)
        return z + z * y.as_strided((1, 8), (0, 1), 8) + torch.topk(y, 2).values.sum() * -0.0 + y.std() * 0.0


def captured(plain: bool, monkeypatch: pytest.MonkeyPatch, again: bool = False) -> Capture:
    torch.manual_seed(0)
    layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def step(params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            return (x**2).mean()

        with torch.nn.utils.stateless._reparametrize_module(layers, {**params, **buffers}):
            loss = run(x)
            return loss, torch.autograd.grad(loss, list(params.values())), dict(layers.named_buffers())

    with monkeypatch.context() as patch:
        if plain:
            patch.setattr(expansions, "_key", no_key)
        return capture(step, dict(layers.named_parameters()), dict(layers.named_buffers()), torch.zeros(2, 4, 8))


def no_key(*_: Any) -> Any:
    raise NotAlike


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_copies_are_what_make_fx_would_have_made(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    with_copies, alone = captured(False, monkeypatch, again), captured(True, monkeypatch, again)
    assert with_copies.graph.code == alone.graph.code
    values = [id(node.meta["val"]) for node in with_copies.graph.graph.nodes if node.op == "call_function"]
    assert len(set(values)) < len(values) / 2  # a copy has the value of what it is a copy of
    for one, other in zip(with_copies.graph.graph.nodes, alone.graph.graph.nodes, strict=True):
        assert described(one) == described(other), one
    lines = [c.user_line(n) for c in (with_copies, alone) for n in c.graph.graph.nodes]
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def described(node: torch.fx.Node) -> Any:
    values = node.meta.get("val")
    tensors = values if isinstance(values, tuple | list) else [values]
    return node.name, [(t.shape, t.dtype, t.stride()) for t in tensors if isinstance(t, torch.Tensor)]


LITERALS: list[tuple[Callable[[torch.Tensor, Any], torch.Tensor], list[Any]]] = [
    (torch.add, [0.0, -0.0, 0, False, 1, True, 1.0]),
    (torch.sum, [0, 1, -1]),
    (torch.Tensor.to, [torch.float16, torch.bfloat16, torch.int32]),
]


@pytest.mark.parametrize(("op", "literals"), LITERALS, ids=["add", "sum", "to"])
def test_literals_that_compare_equal_are_not_alike(op: Any, literals: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def each(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [op(one, literal) for one, literal in itertools.product((x, y, x.t()), literals)]

    args = (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float16))
    with_copies = capture(each, *args)
    monkeypatch.setattr(expansions, "_key", no_key)
    assert with_copies.graph.code == capture(each, *args).graph.code


def test_operands_that_are_one_tensor_are_not_like_two(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x * x, x * y, y * y, y * x, F.huber_loss(x, x), F.huber_loss(x, y), F.huber_loss(y, y)]

    args = (torch.zeros(2), torch.zeros(2))
    with_copies = capture(step, *args)
    monkeypatch.setattr(expansions, "_key", no_key)
    assert with_copies.graph.code == capture(step, *args).graph.code
