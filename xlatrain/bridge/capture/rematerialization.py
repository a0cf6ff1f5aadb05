"""``torch.utils.checkpoint`` in a compiled step: the recomputation must survive XLA.

Captured, a checkpointed block appears twice in the graph, in the forward pass and again before its backward. XLA would find
the two equal and compute one, which keeps every activation alive. An optimization barrier on the inputs of the second keeps
them apart.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint

from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.patches import patched

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")


def define_identity(name: str) -> None:
    """Define an op of ours that gives its tensor, and whose gradient is that of its result."""
    _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    fake_kernel(_LIBRARY, name)(torch.empty_like)
    torch.library.register_autograd(f"xlatrain::{name}", lambda _, grad: grad, lib=_LIBRARY)


define_identity("barrier")


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

    with patched([(module, "_checkpoint_without_reentrant_generator", generator)]):
        yield


def checkpointed_modules(module: torch.nn.Module, patterns: Sequence[str], argument: str = "remat") -> dict[str, torch.nn.Module]:
    """The modules below ``module`` whose path a glob matches; of nested modules the outermost.

    Args:
        argument: what errors call the globs.

    Raises:
        ValueError: a glob that matches no module.
    """
    found: dict[str, torch.nn.Module] = {}
    paths = [path for path, _ in module.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths if path):
            raise ValueError(
                f"{argument} pattern {pattern!r} matches no module of {type(module).__name__}; paths are those of "
                f"named_modules(), e.g. {', '.join(map(repr, paths[1:4]))}"
            )
    for path, child in module.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not inside and any(fnmatchcase(path, pattern) for pattern in patterns):
            found[path] = child
    return found


@contextlib.contextmanager
def rematerialized(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block, the backward pass of these modules computes their activations again instead of keeping them.

    As ``torch.utils.checkpoint(module, …, use_reentrant=False)``: the same numbers, dropout too. Without gradients nothing
    changes.
    """
    with forwards(modules, _checkpointed):
        yield


@contextlib.contextmanager
def forwards(modules: Sequence[torch.nn.Module], wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace ``module.forward`` of each of these modules by ``wrapped(forward)`` in the block."""
    own = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.__dict__["forward"] = wrapped(module.forward)  # past __setattr__: the module's own state has not changed
    try:
        yield
    finally:
        for module, before in zip(modules, own, strict=True):
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed
