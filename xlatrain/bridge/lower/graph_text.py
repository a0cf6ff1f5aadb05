"""A captured graph as text by which another process knows it: of equal texts the lowerings make equal programs."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from xlatrain.bridge.capture.capture import Capture
from xlatrain.bridge.capture.op_log import argument_text, leaves_of
from xlatrain.bridge.capture.tracebacks import in_backward
from xlatrain.bridge.lower.registry import is_ours
from xlatrain.bridge.random import FILLED
from xlatrain.bridge.tensors.constants import bytes_of, contents_of
from xlatrain.bridge.tensors.strides import strides_of
from xlatrain.xla.told import NotToldError

_ATTENTION = ("attention", "banded_attention", "dropout_attention")
KNOWN_OPS = frozenset(
    {
        *FILLED,
        *("randperm", "poisson", "binomial", "gamma", "barrier", "ctc_loss", "grouped_mm", "recurrence", "recurrence_backward"),
        "linear_sum_assignment",
        *("picked_log_softmax", "picked_log_softmax_backward"),
        *(f"{name}{suffix}" for name in _ATTENTION for suffix in ("", "_backward")),
    }
)
"""Our own ops whose arguments are all there is to them: none is the number of something that this process has."""


def graph_text(capture: Capture) -> str:
    """All of a graph that its program is made from.

    Raises:
        NotToldError: it has ops whose meaning another process may not know, constants without values to tell, or bounds.
    """
    if capture.bounds is not None or capture.untraced:
        raise NotToldError("it has more than ops")
    numbers: dict[Node, str] = {}
    words: list[str] = []
    for number, node in enumerate(capture.graph.graph.nodes):
        numbers[node] = f"%{number}"
        words.append(f"{_op(capture, node)} {_arguments(node, numbers)} {_look(node.meta.get('val'))} {in_backward(node)}")
    draws = capture.host_draws
    drawn = None if draws is None else (list(draws.draws.items()), draws.rows)
    words.append(f"{capture.inputs} {capture.outputs} {capture.result} {drawn} {torch.get_default_dtype()}")
    return "\n".join(words)


def graph_digest(capture: Capture) -> str:
    """A digest of :func:`graph_text`.

    Raises:
        NotToldError: there is none.
    """
    if capture.digest is None:
        object.__setattr__(capture, "digest", hashlib.sha256(graph_text(capture).encode(errors="surrogatepass")).hexdigest())
    assert capture.digest is not None
    return capture.digest


def _op(capture: Capture, node: Node) -> str:
    if node.op in ("placeholder", "output"):
        return node.op
    if node.op == "get_attr":
        tensor = capture.constants.get(str(node.target))
        if tensor is None or bytes_of(tensor) is None:
            raise NotToldError(f"{node.target} is no plain tensor")
        return f"constant {tensor.dtype}{tuple(tensor.shape)}{strides_of(tensor)}{contents_of(tensor)}"
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        if getattr(target, "__module__", None) == "_operator":
            return f"operator {target.__name__}"  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        raise NotToldError(f"{target} is no op")
    named = target._opname in KNOWN_OPS if target.namespace == "xlatrain" else target.namespace in ("aten", "prims")
    if not (named and is_ours(target)):
        raise NotToldError(f"{target} may be another op elsewhere")
    return str(target)


def _arguments(node: Node, numbers: dict[Node, str]) -> str:
    given: Any = map_arg((node.args, node.kwargs), numbers.__getitem__)
    for leaf in leaves_of(given):
        if "\x1f" in argument_text(leaf, str(node.target)):
            raise NotToldError(f"{node.target} is given an object")
    return repr(given)


def _look(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{strides_of(value)}"
    return f"[{','.join(map(_look, value))}]" if isinstance(value, list | tuple) else repr(value)
