"""``torch.utils.checkpoint`` in a compiled step: the recomputation must survive XLA.

Captured, a checkpointed block appears twice in the graph, in the forward pass and again before its backward. XLA would find
the two equal and compute one, which keeps every activation alive. An optimization barrier on the inputs of the second keeps
them apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("barrier(Tensor x) -> Tensor")


@torch.library.register_fake("xlatrain::barrier", lib=_LIBRARY)
def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad


torch.library.register_autograd("xlatrain::barrier", _backward, lib=_LIBRARY)


def _behind_barrier(function: Callable[..., Any]) -> Callable[..., Any]:
    def recompute(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.ops.xlatrain.barrier, (args, kwargs))
        return function(*args, **kwargs)

    return recompute


@contextlib.contextmanager
def kept_recomputation() -> Iterator[None]:
    """Within the block, what ``torch.utils.checkpoint`` recomputes is captured behind a barrier."""
    module = torch.utils.checkpoint
    original = module._checkpoint_without_reentrant_generator

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # the generator calls the function for the recomputation only; the forward pass is the caller's
        return original(_behind_barrier(function), *args, **kwargs)

    module._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = original
