"""A ``tree_map_only`` for the trees that functionalization maps: an op's arguments and results.

``torch.utils._pytree`` describes a tree as an object and builds the result from it: a tenth of a capture, for trees that are a
tuple of tensors and numbers. Tuples, lists and dicts are walked directly here; anything else that is a tree is left to torch.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.graph as fx_graph
import torch.utils._pytree as pytree
from torch._subclasses import functional_tensor

from xlatrain.bridge.patches import patched

_LEAVES = frozenset(
    (int, float, bool, str, type(None), torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def tree_map_only(kind: Any, function: Callable[[Any], Any], tree: Any, *rest: Any, **options: Any) -> Any:
    """``torch.utils._pytree.tree_map_only``, faster for plain containers."""
    if rest or options or not isinstance(kind, type):
        return pytree.tree_map_only(kind, function, tree, *rest, **options)

    def mapped(value: Any) -> Any:
        container = type(value)
        if container is tuple:
            return tuple([mapped(one) for one in value])
        if container is list:
            return [mapped(one) for one in value]
        if container is dict:
            return {name: mapped(one) for name, one in value.items()}
        if isinstance(value, kind):
            return function(value)
        return value if container in _LEAVES else pytree.tree_map_only(kind, function, value)

    return mapped(tree)


@contextlib.contextmanager
def direct_tree_maps() -> Iterator[None]:
    """Let functionalization map trees directly, and a graph look for no symbolic numbers in its nodes' arguments."""
    maps = types.SimpleNamespace(**{**vars(pytree), "tree_map_only": tree_map_only})
    no_search = types.SimpleNamespace(**{**vars(pytree), "tree_iter": lambda _: ()})
    with patched([(functional_tensor, "pytree", maps), (fx_graph, "pytree", no_search)]):
        yield
