"""The range of integers that a graph computes, as far as the ops that made them tell."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.fx.node import Node

Range: TypeAlias = tuple[int, int]
"""The smallest and the largest value."""

_aten = torch.ops.aten
_SAME = {
    getattr(packet, overload)
    for packet, overload in (
        *((getattr(_aten, name), "default") for name in ("alias", "detach", "clone", "unsqueeze", "squeeze", "view", "reshape")),
        *((getattr(_aten, name), "default") for name in ("expand", "permute", "t", "repeat", "flip", "_unsafe_view")),
        (_aten.squeeze, "dim"),
        (_aten.squeeze, "dims"),
        (_aten.transpose, "int"),
        (_aten.slice, "Tensor"),
        (_aten.select, "int"),
    )
}
"""Ops whose result has no other values than their first argument."""

_PLACES = {_aten.argmax.default, _aten.argmin.default}
_WITH_PLACES = {_aten.topk.default, _aten.sort.default, _aten.sort.stable, _aten.max.dim, _aten.min.dim}
"""Ops whose second result is places along a dim."""

_SMALL = 2**16


class IndexBounds:
    """Ranges of the integers of one graph.

    Args:
        constants: the graph's, by name.
    """

    def __init__(self, constants: Mapping[str, torch.Tensor]) -> None:
        self._constants = constants
        self._known: dict[Node, Range | None] = {}

    def within(self, node: Any, low: int, high: int) -> bool:
        """Whether all of a tensor is known to be in this range, both ends included."""
        found = self.of(node)
        return found is not None and low <= found[0] and found[1] <= high

    def of(self, node: Any) -> Range | None:
        """The range of a tensor or number; None if unknown."""
        if isinstance(node, bool | int):
            return int(node), int(node)
        if not isinstance(node, Node):
            return None
        if node not in self._known:
            self._known[node] = None  # for deep graphs: what is asked for while it is found
            self._known[node] = self._found(node)
        return self._known[node]

    def _found(self, node: Node) -> Range | None:
        if node.op == "get_attr":
            return _values(self._constants.get(str(node.target)))
        if node.op != "call_function":
            return None
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            return 0, 1
        target, args = node.target, node.args
        if target in _SAME:
            return self.of(args[0])
        if target is operator.getitem:
            source: Any = args[0]
            return _places(source) if args[1] == 1 and source.target in _WITH_PLACES else None
        if target in _PLACES:
            return _places(node)
        if not isinstance(value, torch.Tensor) or value.dtype.is_floating_point or value.dtype.is_complex:
            return None
        return self._arithmetic(node)

    def _arithmetic(self, node: Node) -> Range | None:
        """The range of a tensor of integers that is made of numbers and of other tensors."""
        target, args = node.target, node.args
        if target is _aten._to_copy.default:
            given = args[0].meta.get("val") if isinstance(args[0], Node) else None
            return None if given is None or given.dtype.is_floating_point else self.of(args[0])
        if target is _aten.arange.start_step:
            return _arange(*args)
        if target in (_aten.scalar_tensor.default, _aten.full_like.default, _aten.full.default):
            return self.of(args[0 if target is _aten.scalar_tensor.default else 1])
        if target is _aten.clamp.default and len(args) == 3:
            return None if None in args else (int(args[1]), int(args[2]))  # pyright: ignore[reportArgumentType]
        if target is _aten.remainder.Scalar and isinstance(args[1], int) and args[1] > 0:
            return 0, args[1] - 1
        if target is _aten.where.self:
            return _hull(self.of(args[1]), self.of(args[2]))
        if node.kwargs or len(args) != 2:
            return None
        left, right = self.of(args[0]), self.of(args[1])
        if left is None or right is None:
            return None
        if target in (_aten.add.Tensor, _aten.add.Scalar):
            return left[0] + right[0], left[1] + right[1]
        if target in (_aten.sub.Tensor, _aten.sub.Scalar):
            return left[0] - right[1], left[1] - right[0]
        if target in (_aten.mul.Tensor, _aten.mul.Scalar):
            ends = [a * b for a in left for b in right]
            return min(ends), max(ends)
        return None


def _hull(one: Range | None, other: Range | None) -> Range | None:
    return None if one is None or other is None else (min(one[0], other[0]), max(one[1], other[1]))


def _values(constant: torch.Tensor | None) -> Range | None:
    if constant is None or constant.dtype.is_floating_point or constant.dtype.is_complex or not 0 < constant.numel() <= _SMALL:
        return None
    return int(constant.min()), int(constant.max())


def _arange(start: Any, end: Any, step: Any = 1) -> Range | None:
    if not all(isinstance(number, int) for number in (start, end, step)) or step <= 0 or end <= start:
        return None
    return start, start + step * (math.ceil((end - start) / step) - 1)


def _places(node: Node) -> Range | None:
    """The range of places along the dim that an op looks along: at most those of the largest dim, or all of a flat one."""
    given = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    if given is None or not given.numel():
        return None
    position = {_aten.topk.default: 2, _aten.sort.stable: 2}.get(node.target, 1)  # pyright: ignore[reportArgumentType, reportCallIssue]
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", -1 if node.target not in _PLACES else None)
    if dim is None:
        return 0, given.numel() - 1
    return 0, (given.shape[dim] if given.ndim else 1) - 1  # pyright: ignore[reportArgumentType, reportCallIssue]
