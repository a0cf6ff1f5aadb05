"""Values of a graph that depend on no input of it: computed while it is captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.fx.node import Node, map_arg
from torch.utils._python_dispatch import _disable_current_modes

_LARGEST = 1 << 30
"""Bytes. What would be larger is not computed."""
_FILLS = (torch.ops.aten.full.default, torch.ops.aten.full_like.default)
"""Ops that fill a tensor with a number, their second argument."""
_COMPARED = 1 << 24
"""Numbers. Of smaller tensors it is found out whether they are the same all along a dim."""


class KnownValues:
    """The values of one graph's nodes, where they are known; dims along which nothing changes are kept once.

    Args:
        constants: the tensors that ``get_attr`` nodes stand for.
    """

    def __init__(self, constants: Mapping[str, torch.Tensor]) -> None:
        self._constants = constants
        self._found: dict[Node, torch.Tensor | None] = {}

    def of(self, node: Node) -> torch.Tensor | None:
        """The value of a node, with strides of 0 along dims where it is the same.

        Returns:
            None if it depends on an input or a draw, or is too large.
        """
        todo = [node]
        while todo:
            one = todo[-1]
            needed = [] if one.target in _FILLS else one.all_input_nodes
            missing = [given for given in needed if given not in self._found]
            if one in self._found or not missing:
                todo.pop()
                if one not in self._found:
                    with _disable_current_modes(), torch.no_grad():
                        self._found[one] = self._computed(one)
            elif any(self._found.get(given, self) is None for given in one.all_input_nodes) or not _is_pure(one):
                todo.pop()
                self._found[one] = None
            else:
                todo.extend(missing)
        return self._found[node]

    def _computed(self, node: Node) -> torch.Tensor | None:
        if node.op == "get_attr":
            return self._constants.get(cast(str, node.target))
        promised = node.meta.get("val")
        if not isinstance(promised, torch.Tensor):
            return None
        if node.target in _FILLS:
            return torch.full((), cast(float, node.args[1]), dtype=promised.dtype).expand(promised.shape)
        if not _is_pure(node) or any(self._found[given] is None for given in node.all_input_nodes):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda given: self._found[given])
        target = cast(Any, node.target)
        if torch.Tag.pointwise in target.tags:
            args, kwargs = _narrowed(args, kwargs, promised.ndim)
        elif not _is_view(target) and promised.numel() * promised.element_size() > _LARGEST:
            return None
        if torch.Tag.pointwise in target.tags and _size_of(args) * promised.element_size() > _LARGEST:
            return None
        try:
            value = target(*args, **kwargs)
            return _collapsed(value).expand(promised.shape) if isinstance(value, torch.Tensor) else None
        except RuntimeError:  # torch has no kernel for it here
            return None


def _is_pure(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "get_attr"
    return node.target.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_view(target: Any) -> bool:
    """Whether it may give a view, and does of what has been expanded."""
    return target in (torch.ops.aten.expand.default, torch.ops.aten.unsqueeze.default, torch.ops.aten.alias.default)


def _narrowed(args: Any, kwargs: Any, dims: int) -> tuple[Any, Any]:
    """The operands of a pointwise op with one entry along each of the result's dims where none of them changes."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    changing = {i - dims for i in range(dims)}
    for dim in tuple(changing):
        if all(x.ndim < -dim or x.shape[dim] == 1 or x.stride(dim) == 0 for x in tensors):
            changing.discard(dim)

    def narrow(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        for dim in range(-x.ndim, 0):
            if dim not in changing and x.shape[dim] > 1:
                x = x.narrow(dim, 0, 1)
        return x

    return tuple(narrow(x) for x in args), {name: narrow(x) for name, x in kwargs.items()}


def _size_of(args: Any) -> int:
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    return torch.broadcast_shapes(*(x.shape for x in tensors)).numel() if tensors else 0


def _collapsed(value: torch.Tensor) -> torch.Tensor:
    """With one entry along dims where it is the same."""
    for dim in range(value.ndim):
        if value.shape[dim] < 2:
            continue
        first = value.narrow(dim, 0, 1)
        if value.stride(dim) == 0 or (value.numel() <= _COMPARED and bool((value == first).all())):
            value = first
    return value
