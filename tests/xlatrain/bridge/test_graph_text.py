"""A graph as text by which another process finds its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower import registry
from xlatrain.bridge.lower.graph_text import KNOWN_OPS, graph_text
from xlatrain.bridge.lower.registry import lowers
from xlatrain.xla.told import NotToldError

X = torch.zeros(2, 3)
SMALL, LARGE = torch.tensor([1.0, 2.0, 3.0]), torch.ones(1 << 16)

DIFFERENT: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "plain": (lambda x: x * 2, (X,)),
    "another number": (lambda x: x * 2.5, (X,)),
    "another op": (lambda x: x + 2, (X,)),
    "another shape": (lambda x: x * 2, (torch.zeros(3, 2),)),
    "another dtype": (lambda x: x * 2, (X.double(),)),
    "other strides": (lambda x: x * 2, (torch.zeros(3, 2).t(),)),
    "one more input": (lambda x, y: x * 2, (X, X)),
    "another result": (lambda x: {"a": x * 2}, (X,)),
    "two results": (lambda x: (x * 2, x * 2), (X,)),
    "a constant": (lambda x: x * SMALL, (X,)),
    "a constant of other values": (lambda x: x * torch.tensor([1.0, 2.0, 4.0]), (X,)),
    "a large constant": (lambda x: x.sum() * LARGE, (X,)),
    "draws": (lambda x: x * torch.rand(2, 3), (X,)),
    "other draws": (lambda x: x * torch.randn(2, 3), (X,)),
    "another order of operands": (lambda x, y: x - y, (X, X.clone())),
    "the other order": (lambda x, y: y - x, (X, X.clone())),
}


def test_each_difference_is_in_the_text() -> None:
    texts = {name: graph_text(capture(function, *args)) for name, (function, args) in DIFFERENT.items()}
    assert len(set(texts.values())) == len(texts)
    for name, (function, args) in DIFFERENT.items():
        assert graph_text(capture(function, *args)) == texts[name]


def test_the_value_of_a_large_constant_is_in_the_text() -> None:
    before = graph_text(capture(lambda x: x.sum() * LARGE, X))
    LARGE[-1] = 2
    try:
        assert graph_text(capture(lambda x: x.sum() * LARGE, X)) != before
    finally:
        LARGE[-1] = 1


def test_ops_of_others_have_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.library.define("xlatrain_graph_text::scaled", "(Tensor x) -> Tensor")
    torch.library.register_fake("xlatrain_graph_text::scaled", torch.empty_like)
    lowers("xlatrain_graph_text.scaled.default")(lambda x: x * 2)
    try:
        with pytest.raises(NotToldError, match="may be another op elsewhere"):
            graph_text(capture(torch.ops.xlatrain_graph_text.scaled, X))
    finally:
        registry._TABLE.pop(torch.ops.xlatrain_graph_text.scaled.default)
    monkeypatch.setattr(registry, "_OURS", registry._OURS - {torch.ops.aten.mul.Tensor})
    with pytest.raises(NotToldError, match="may be another op elsewhere"):  # torch's op, with a lowering of the user's
        graph_text(capture(lambda x: x * 2, X))


def test_ops_with_numbers_of_what_this_process_has_are_not_known() -> None:
    for name in KNOWN_OPS:
        schema = getattr(torch.ops.xlatrain, name).default._schema
        assert not {argument.name for argument in schema.arguments} & {"plan", "mesh", "loop", "call", "program"}, name
