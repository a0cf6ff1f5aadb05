"""A backward pass of which somebody sees more than the gradients of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_compat.step.capture.taken_hooks import TakenHooks
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.patches import patched

_RETAIN = torch.Tensor.retain_grad


class WatchedBackward:
    """The backward pass of an automatically optimized step, where ``loss.backward()`` does more than ``torch.autograd.grad``.

    Args:
        hooks: of the parameters.
    """

    def __init__(self, hooks: TakenHooks) -> None:
        self._hooks = hooks
        self._retained: list[torch.Tensor] = []

    @property
    def needed(self) -> bool:
        """Whether it must be ``loss.backward()``: there are hooks that nothing else calls, or a tensor retains its gradient."""
        return bool(self._hooks.on_nodes or self._retained)

    def needed_for(self, loss: torch.Tensor, values: Sequence[torch.Tensor]) -> bool:
        """The same, also where a loss leads to other leaves than ``values``: a batch with ``requires_grad_()``, whose hooks are
        called and whose gradient is there afterwards, and so is what Functions on the way to it do in their backward."""
        known = set(map(id, values))
        self._retained += [leaf for leaf in _leaves(loss) if id(leaf) not in known]
        return self.needed

    def refuse_accumulated(self, accumulate: int) -> None:
        """Refuse hooks that see the sum over several batches, of which a captured step has only its own part.

        Raises:
            CaptureError: there is one.
        """
        if self._hooks.on_sums and accumulate > 1:
            raise CaptureError(
                f"the parameter {self._hooks.on_sums[0]!r} has a hook of register_post_accumulate_grad_hook, or one on the node "
                f"that adds to its gradient, which with accumulate_grad_batches={accumulate} sees the sum of several batches' "
                "gradients: a compiled step has those of its own batch only.\n"
                "  Fix: register_hook, which sees the batch's own gradient, or on_before_optimizer_step."
            )

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note the tensors that ``retain_grad()`` is called of."""

        def retain_grad(tensor: torch.Tensor, *args: Any) -> None:
            _RETAIN(tensor, *args)
            if tensor.requires_grad and not tensor.is_leaf:
                self._retained.append(tensor)

        with patched((kind, "retain_grad", retain_grad) for kind in (FunctionalTensor, FakeTensor)):
            yield


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors whose gradients a backward pass adds to."""
    todo, met = [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in met:
            met.add(node)
            todo += [after for after, _ in node.next_functions]
            if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
                yield leaf
