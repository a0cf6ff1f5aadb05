"""Losses over a large vocabulary: the product that gives logits, their log-softmax, and the entries that labels pick, as one op.

Logits of 4,096 tokens and 128,256 words are 2 GB in float32, of which a loss needs a number for each token. The op gives that
number, and its backward pass the gradients by what was multiplied, so that logits can be made, and made again, a stretch of the
vocabulary at a time (:mod:`xlatrain.bridge.lower.lowerings.vocabulary`). It is found in the captured graph, whoever wrote it:
``F.cross_entropy``, ``F.nll_loss`` and what transformers' models compute are the same ops there, and weights of the mean, ignored
labels and reductions stay as they are. Logits that anything else reads stay whole.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx.node import Node
from torch.utils.flop_counter import register_flop_formula

import xlatrain.bridge.capture.activations  # noqa: F401  defines the ops
from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.graph_nodes import NodeMaker

ENVIRONMENT = "XLATRAIN_LOGITS"
_DEFAULT = 1 << 27
"""512 MiB in float32: fewer are not worth a second product in the backward pass."""

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("picked_log_softmax(Tensor x, Tensor weight, Tensor? bias, Tensor index) -> (Tensor, Tensor)")
_LIBRARY.define(
    "picked_log_softmax_backward(Tensor factor, Tensor x, Tensor weight, Tensor? bias, Tensor index, Tensor logsumexp) -> "
    "(Tensor, Tensor, Tensor)"
)


@fake_kernel(_LIBRARY, "picked_log_softmax")
def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Shapes of the log-probabilities, and of the log-sum-exp of each row: that of the index, float32."""
    return index.new_empty(index.shape, dtype=torch.float32), index.new_empty(index.shape, dtype=torch.float32)


@fake_kernel(_LIBRARY, "picked_log_softmax_backward")
def _fake_backward(
    factor: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, index: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Shapes of the gradients by x, weight and bias."""
    return torch.empty_like(x), torch.empty_like(weight), x.new_empty(weight.shape[:1])


@register_flop_formula(torch.ops.xlatrain.picked_log_softmax)
def _flops(x: Any, weight: Any, bias: Any, index: Any, **_: Any) -> int:
    """FLOPs of the product that gives the logits, by shapes."""
    return 2 * torch.Size(index).numel() * torch.Size(weight).numel()


@register_flop_formula(torch.ops.xlatrain.picked_log_softmax_backward)
def _flops_backward(factor: Any, x: Any, weight: Any, bias: Any, index: Any, *_: Any, **__: Any) -> int:
    """FLOPs of the gradients by both factors."""
    return 2 * _flops(x, weight, bias, index)


_ATEN, _OURS = torch.ops.aten, torch.ops.xlatrain
_FORWARD, _BACKWARD = _OURS.picked_log_softmax.default, _OURS.picked_log_softmax_backward.default
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)
_SAME = (_ATEN.alias.default, _ATEN.detach.default, _ATEN.clone.default, _OURS.split_rows.default)
_PRODUCTS = {_ATEN.mm.default: 0, _ATEN.addmm.default: 1}
"""Products, and which of their arguments is multiplied first."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def largest() -> int:
    """The number of logits that a device may have at a time, 2**27 or the environment variable ``XLATRAIN_LOGITS``.

    Raises:
        ValueError: the variable is no number of at least 0.
    """
    text = os.environ.get(ENVIRONMENT, str(_DEFAULT))
    if not text.isdigit():
        raise ValueError(
            f"{ENVIRONMENT}={text!r}: expected how many logits a device may have at a time ({_DEFAULT} by default); 0: any"
        )
    return int(text)


def pick_from_vocabularies(graph: torch.fx.Graph) -> bool:
    """Rewrite large losses of a captured graph in place; whether there was any to rewrite."""
    limit, changed = largest(), False
    for node in list(graph.nodes) if limit else ():
        if node.target is _ATEN._log_softmax.default and node.meta["val"].numel() > limit:
            loss = _loss_of(node)
            changed |= loss is not None
            if loss is not None:
                _rewrite(graph, loss)
    return changed


def losses_of(graph: torch.fx.Graph) -> list[str]:
    """Tell of each loss of a captured graph whose logits are never whole, in words."""
    found = []
    for node in graph.nodes:
        if node.target is _FORWARD:
            weight, index = (cast(Any, node.args[i]).meta["val"] for i in (1, 3))
            found.append(
                f"loss of {index.numel()} rows over {weight.shape[0]} words: at most {largest()} logits of a device at a time"
            )
    return found


@dataclass(frozen=True)
class _Gradient:
    """The gradient by the logits, and all that is computed from it.

    Attributes:
        node: the gradient (N, V).
        index: (N, 1), the entries to which the labels add.
        factor: (N, 1), and a number: their product is what is added there.
        by_x, by_weight, by_bias: products with the weight; with x, and whether (V, D) is turned; sums over the rows.
    """

    node: Node
    index: Node
    factor: tuple[Node, float]
    by_x: list[Node]
    by_weight: list[tuple[Node, bool]]
    by_bias: list[Node]


@dataclass(frozen=True)
class _Loss:
    """A loss whose logits nothing else reads.

    Attributes:
        product: that gives the logits (N, V).
        picked: the log-probabilities of labels, a ``gather``.
        gradient: None in evaluation.
    """

    product: Node
    picked: Node
    gradient: _Gradient | None


def _loss_of(softmax: Node) -> _Loss | None:
    """The loss that begins with a log-softmax; None if its logits, or log-probabilities, are read otherwise."""
    logits, dim = cast(Node, softmax.args[0]), softmax.args[1]
    if softmax.meta["val"].ndim != 2 or dim not in (1, -1):
        return None
    product = _product_of(logits, softmax)
    users = [user for user in _users(softmax) if user.target is not _ATEN.full_like.default]
    picked = [user for user in users if user.target is _ATEN.gather.default]
    exponentials = [user for user in users if user.target is _ATEN.exp.default]
    if product is None or len(picked) != 1 or len(users) != 1 + len(exponentials) or len(exponentials) > 1:
        return None
    if picked[0].args[1] not in (1, -1) or picked[0].meta["val"].shape[1] != 1:
        return None
    if not exponentials:
        return _Loss(product, picked[0], None)
    gradient = _gradient_of(exponentials[0], product)
    return None if gradient is None else _Loss(product, picked[0], gradient)


def _users(node: Node) -> Iterator[Node]:
    """The users of a value, also under other names."""
    for user in node.users:
        if user.target in _SAME:
            yield from _users(user)
        else:
            yield user


def _product_of(node: Node, user: Node) -> Node | None:
    """The product that only ``user`` reads, through views and casts."""
    words = node.meta["val"].shape[-1]
    while list(node.users) == [user] and node.meta["val"].shape[-1] == words:
        if node.target in _PRODUCTS:
            of_floats = node.meta["val"].dtype in _DTYPES and not node.kwargs
            return node if of_floats else None
        if not _passes_on(node):
            return None
        node, user = cast(Node, node.args[0]), node
    return None


def _passes_on(node: Node) -> bool:
    """Whether a node is the one before in another shape or dtype of floats."""
    if node.target is _ATEN._to_copy.default:
        return all(one.meta["val"].is_floating_point() for one in (node, cast(Node, node.args[0])))
    return node.target in (*_VIEWS, *_SAME)


def _gradient_of(exponential: Node, product: Node) -> _Gradient | None:
    """The gradient by the logits that is what log-softmax of picked entries gives: ``given - exp(x) * sum(given)``."""
    weighted = _only_user(exponential, _ATEN.mul.Tensor)
    node = weighted and _only_user(weighted, _ATEN.sub.Tensor)
    if weighted is None or node is None or node.kwargs or node.args[1] is not weighted:
        return None
    given, total = node.args[0], next((one for one in weighted.args if one is not exponential), None)
    if not isinstance(given, Node) or not isinstance(total, Node) or total.target is not _ATEN.sum.dim_IntList:
        return None
    if total.args not in ((given, [1], True), (given, [-1], True)) or set(given.users) != {total, node}:
        return None
    label = _label_of(given)
    return None if label is None else _products_with(node, product, *label)


def _only_user(node: Node, target: Any) -> Node | None:
    (user, *others) = node.users
    return None if others or user.target is not target else user


def _label_of(given: Node) -> tuple[Node, tuple[Node, float]] | None:
    """Index and factor of what is zero but for an entry of each row: ``scatter(zeros, index, number) * factor``."""
    if given.target is not _ATEN.mul.Tensor:
        return None
    scatters = [one for one in given.args if isinstance(one, Node) and one.target is _ATEN.scatter.value]
    factors = [one for one in given.args if isinstance(one, Node) and one not in scatters]
    if len(scatters) != 1 or len(factors) != 1 or len(scatters[0].users) != 1 or len(scatters[0].args) != 4:
        return None
    base, dim, index, number = scatters[0].args
    rows = (given.meta["val"].shape[0], 1)
    zeros = isinstance(base, Node) and base.target is _ATEN.full_like.default and base.args[1] == 0 and len(base.users) == 1
    if not zeros or dim not in (1, -1) or cast(Node, index).meta["val"].shape != rows or factors[0].meta["val"].shape != rows:
        return None
    return cast(Node, index), (factors[0], cast(float, number))


def _products_with(gradient: Node, product: Node, index: Node, factor: tuple[Node, float]) -> _Gradient | None:
    """The gradient with its uses; None if there are others than the gradients of the product."""
    first = _PRODUCTS[cast(Any, product.target)]
    x, weight = (cast(Node, product.args[first + i]) for i in (0, 1))
    found = _Gradient(gradient, index, factor, [], [], [])
    words = product.meta["val"].shape[1]
    for node, turned in _uses(gradient, words, turned=False):
        if node.target is _ATEN.sum.dim_IntList and not turned and node.args[1:] == ([0], True):
            found.by_bias.append(node)
        elif node.target is not _ATEN.mm.default or node.kwargs:
            return None
        elif node.args[1] is x and turned:
            found.by_weight.append((node, False))
        elif _untransposed(cast(Node, node.args[1])) == _untransposed(weight, turns=1) and not turned:
            found.by_x.append(node)
        elif _untransposed(cast(Node, node.args[0])) == _untransposed(x, turns=1) and not turned:
            found.by_weight.append((node, True))
        else:
            return None
    return found


def _uses(node: Node, words: int, *, turned: bool) -> Iterator[tuple[Node, bool]]:
    """The readers of a gradient (N, V), through views, casts and transposes, and whether they read (V, N)."""
    for user in node.users:
        if _passes_on(user) and not turned and user.meta["val"].shape[-1] == words:
            yield from _uses(user, words, turned=turned)
        elif user.target is _ATEN.t.default:
            yield from _uses(user, words, turned=not turned)
        else:
            yield user, turned


def _untransposed(node: Node, turns: int = 0) -> tuple[Node, bool]:
    """The node that is transposed, and whether an odd number of times, ``turns`` of them counted before."""
    while node.target is _ATEN.t.default:
        node, turns = cast(Node, node.args[0]), turns + 1
    return node, turns % 2 == 1


def _rewrite(graph: torch.fx.Graph, loss: _Loss) -> None:
    """Put the ops in place of a loss; what computed its logits is left without a use."""
    first = _PRODUCTS[cast(Any, loss.product.target)]
    rows, turned = (cast(Node, loss.product.args[first + i]) for i in (0, 1))
    bias = cast(Node, loss.product.args[0]) if first else None
    make = NodeMaker(graph, loss.picked)
    base, odd = _untransposed(turned)
    weight = base if odd else make(_ATEN.t.default, turned)
    x = _before_view(rows)
    given = (x, weight, bias)
    both = make(_FORWARD, *given, loss.picked.args[2])
    picked, logsumexp = make(operator.getitem, both, 0), make(operator.getitem, both, 1)
    _replace(loss.picked, picked, make)
    if loss.gradient is not None:
        _rewrite_gradient(graph, loss.gradient, given, logsumexp)


def _rewrite_gradient(graph: torch.fx.Graph, gradient: _Gradient, given: Any, logsumexp: Node) -> None:
    make = NodeMaker(graph, gradient.node)
    factor, number = gradient.factor
    factor = make(_ATEN.mul.Scalar, factor, number)
    all_three = make(_BACKWARD, factor, *given, gradient.index, logsumexp)
    by_x, by_weight, by_bias = (make(operator.getitem, all_three, i) for i in range(3))
    for node in gradient.by_x:
        shape = list(node.meta["val"].shape)
        _replace(node, by_x if list(by_x.meta["val"].shape) == shape else make(_ATEN.view.default, by_x, shape), make)
    for node, is_turned in gradient.by_weight:
        _replace(node, make(_ATEN.t.default, by_weight) if is_turned else by_weight, make)
    for node in gradient.by_bias:
        _replace(node, make(_ATEN.unsqueeze.default, by_bias, 0), make)


def _before_view(rows: Node) -> Node:
    """The tensor of more dims that (N, D) is a view of: rows that two axes split cannot always be merged where they lie."""
    if rows.target in _VIEWS:
        whole = cast(Node, rows.args[0])
        if whole.meta["val"].ndim > 2 and whole.meta["val"].shape[-1] == rows.meta["val"].shape[-1]:
            return whole
    return rows


def _replace(node: Node, other: Node, make: NodeMaker) -> None:
    dtype = node.meta["val"].dtype
    node.replace_all_uses_with(other if other.meta["val"].dtype == dtype else make(_ATEN._to_copy.default, other, dtype=dtype))
