"""The conditions that a mask joins by "and": known ones, padding of the keys, and equal numbers of segments.

A mask of numbers joins them by adding what is 0 where they hold and minus infinity where not. Between a condition and the mask
are ops that move its values, and make none: where each value comes from is found by moving their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx.node import Node, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from xlatrain.bridge.capture.masks.known import KnownValues

_ATEN = torch.ops.aten
_JOINS = (_ATEN.bitwise_and.Tensor, _ATEN.logical_and.default)
_MOVES = (_ATEN.expand.default, _ATEN.unsqueeze.default, _ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)
_SAME = (_ATEN.alias.default, _ATEN.clone.default, _ATEN.detach.default)
_LARGEST = 1 << 26
"""Numbers that are moved at most to find out where they go."""


@dataclass(frozen=True)
class Condition:
    """A condition, a node of bools, that the mask has moved.

    Attributes:
        node: before.
        moves: the ops between, the first first; a shape stands for broadcasting to it.
        negated: the mask lets see where it does not hold.
    """

    node: Node
    moves: tuple[Node | tuple[int, ...], ...] = ()
    negated: bool = False

    def moved(self, value: torch.Tensor) -> torch.Tensor | None:
        """Move a tensor as the node is moved, in views where that can be; None if it were too large."""
        for move in self.moves:
            if isinstance(move, Node):
                args, kwargs = map_arg((move.args[1:], move.kwargs), lambda given: given.meta["val"])
                stays_view = move.target in (_ATEN.expand.default, _ATEN.unsqueeze.default)
                if not stays_view and move.meta["val"].numel() > _LARGEST and not _is_view(value, move):
                    return None
                value = cast(Any, move.target if stays_view else _ATEN.reshape.default)(value, *args, **kwargs)
            else:
                value = value.expand(move)
        return value


def _is_view(value: torch.Tensor, move: Node) -> bool:
    try:
        value.view(move.meta["val"].shape)
    except RuntimeError:
        return False
    return True


def conditions_of(mask: Node, known: KnownValues) -> Iterator[Condition]:
    """The conditions of a mask; the mask itself, or what is added, if it is none."""
    todo = [Condition(mask)]
    while todo:
        one = todo.pop()
        node = one.node
        is_bool = node.meta["val"].dtype == torch.bool
        joined = node.target in _JOINS if is_bool else node.target is _ATEN.add.Tensor and node.kwargs.get("alpha", 1) == 1
        if node.op != "call_function":
            yield one
        elif joined and all(isinstance(given, Node) for given in node.args):
            shape = tuple(node.meta["val"].shape)
            todo += [Condition(cast(Node, given), (shape, *one.moves)) for given in node.args]
        elif node.target in _SAME or (node.target is _ATEN._to_copy.default and _is_float(node) and _is_float(node.args[0])):
            todo.append(replace(one, node=cast(Node, node.args[0])))
        elif node.target in _MOVES:
            todo.append(replace(one, node=cast(Node, node.args[0]), moves=(node, *one.moves)))
        elif not is_bool and (chosen := _chosen(one, known)) is not None:
            yield chosen
        else:
            yield one


def _is_float(node: Any) -> bool:
    return isinstance(node, Node) and node.meta["val"].is_floating_point()


def _chosen(one: Condition, known: KnownValues) -> Condition | None:
    """The condition of ``where(condition, 0, -inf)``, or the other way round."""
    if one.node.target is not _ATEN.where.self or not all(isinstance(given, Node) for given in one.node.args):
        return None
    condition, first, second = cast(tuple[Node, Node, Node], one.node.args)
    values = [known.of(given) for given in (first, second)]
    if any(value is None for value in values):
        return None
    shown, hidden = ([bool(test(value).all()) for value in values] for test in (_is_zero, _is_hidden))  # pyright: ignore
    if not (shown[0] and hidden[1]) and not (hidden[0] and shown[1]):
        return None
    shape = tuple(one.node.meta["val"].shape)
    return Condition(condition, (shape, *one.moves), negated=hidden[0])


def _is_zero(value: torch.Tensor) -> torch.Tensor:
    return value == 0


def _is_hidden(value: torch.Tensor) -> torch.Tensor:
    return value.isneginf()


def known_part(condition: Condition, known: KnownValues, queries: int, keys: int) -> torch.Tensor | None:
    """(L, S), what a condition that is known lets see, the same for all rows and heads; None if it is another."""
    value = known.of(condition.node)
    moved = None if value is None else condition.moved(value)
    one = None if moved is None else same_for_all_rows(moved, queries, keys)
    if one is None or one.dtype == torch.bool:
        return ~one if one is not None and condition.negated else one
    return one == 0 if bool(((one == 0) | one.isneginf()).all()) else None


def same_for_all_rows(value: torch.Tensor, queries: int, keys: int) -> torch.Tensor | None:
    """(L, S) of a mask (…, L, S); None if rows or heads differ."""
    while value.ndim > 2:
        first = value[:1]
        if value.shape[0] > 1 and value.stride(0) and not bool((value == first).all()):
            return None
        value = first[0]
    return torch.broadcast_to(value, (queries, keys))


def is_of_keys(condition: Condition, node: Node, keys: int) -> bool:
    """Whether a condition's node, or one that it compares, is (B or 1, S), whatever its dims, and says something about keys."""
    return _goes_to(condition, node, keys, -1)


def is_of_queries(condition: Condition, node: Node, queries: int) -> bool:
    """The same of queries, (B or 1, L)."""
    return _goes_to(condition, node, queries, -2)


def _goes_to(condition: Condition, node: Node, length: int, dim: int) -> bool:
    """Whether the values of a node, (B or 1, length), are those of dim ``dim`` and of the rows, the same along all others."""
    size = node.meta["val"].numel()
    if size % length:
        return False
    with _disable_current_modes():
        numbers = torch.arange(size).view(node.meta["val"].shape)
        shape = torch.broadcast_shapes(condition.node.meta["val"].shape, numbers.shape)
        moved = condition.moved(numbers.expand(shape))
        if moved is None or moved.ndim < -dim:
            return False
        while moved.ndim < 4:
            moved = moved[None]
        for other in {-1, -2, -3} - {dim}:
            if not _is_same_along(moved, other):
                return False
            moved = moved.narrow(other, 0, 1)
        if moved.shape[dim] != length:
            return False
        by_row, own = moved.flatten().view(-1, length), numbers.view(-1, length)
        return torch.equal(by_row, own) or (len(own) == 1 and bool((by_row == own).all()))


def _is_same_along(value: torch.Tensor, dim: int) -> bool:
    if value.shape[dim] == 1 or not value.stride(dim):
        return True
    return value.numel() <= _LARGEST and bool((value == value.narrow(dim, 0, 1)).all())


def equal_numbers(condition: Condition) -> tuple[Any, Any] | None:
    """The operands of a comparison of whole numbers."""
    node = condition.node
    if node.target is not _ATEN.eq.Tensor or condition.negated:
        return None
    given = node.args[:2]
    whole = all(isinstance(x, Node) and not x.meta["val"].dtype.is_floating_point for x in given)
    return cast(Any, given) if whole else None
