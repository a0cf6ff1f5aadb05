"""Optimizer updates inside a captured step.

An optimizer's state and options are no business of the captured graph: its update is one opaque node, ``xlatrain::update``, that
takes parameters and gradients and gives new parameters. What the node computes is decided when the graph is lowered: whoever
calls the lowered function says so with :func:`use_updates`, and threads the state from node to node.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence

import jax
import torch

from xlatrain.bridge.errors import LoweringError
from xlatrain.bridge.fake_kernels import fake_kernel

Update = Callable[[int, Sequence[jax.Array], Sequence[jax.Array], jax.Array | None], Sequence[jax.Array]]
"""``(call, params, grads, skip) -> new params``: the ``call``-th update of the step, in the order of their calls; where ``skip``
(bool scalar, or None) it changes nothing."""

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("update(Tensor[] params, Tensor[] grads, int call, Tensor? skip=None) -> Tensor[]")
_UPDATES: contextvars.ContextVar[Update | None] = contextvars.ContextVar("xlatrain_updates", default=None)


@fake_kernel(_LIBRARY, "update")
def _fake(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], call: int, skip: torch.Tensor | None = None
) -> list[torch.Tensor]:
    token = torch.empty((), dtype=torch.float32, device="cpu")
    return [*(torch.empty_like(param, memory_format=torch.contiguous_format) for param in params), token]


def update_node(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], call: int, skip: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Put an update into the graph that is being captured.

    Args:
        params, grads: of the parameters that have a gradient.
        call: how many updates the step has before it.
        skip: bool scalar, where the update changes nothing.

    Returns:
        The new parameters, and a token: a node none of whose results is an output is dropped from a captured graph, but the
        update changes the optimizer's state even where nobody needs the new parameters. So make the token an output.
    """
    with torch.no_grad():
        *new, token = torch.ops.xlatrain.update([p.detach() for p in params], [g.detach() for g in grads], call, skip)
    return new, token


@contextlib.contextmanager
def use_updates(update: Update) -> Iterator[None]:
    """Within the block, update nodes are lowered to ``update``."""
    reset = _UPDATES.set(update)
    try:
        yield
    finally:
        _UPDATES.reset(reset)


def lower_update(
    params: Sequence[jax.Array], grads: Sequence[jax.Array], call: int, skip: jax.Array | None = None
) -> Sequence[jax.Array]:
    """The updated parameters of an update node, computed where the node is lowered.

    Raises:
        LoweringError: the graph is lowered outside of :func:`use_updates`.
    """
    update = _UPDATES.get()
    if update is None:
        raise LoweringError("the captured graph updates parameters, but its lowering was called outside of use_updates(…)")
    return update(call, params, grads, skip)
