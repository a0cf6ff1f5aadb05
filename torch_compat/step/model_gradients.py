"""The gradients of a module whose parameters live on a mesh, as ``p.grad`` shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from torch_compat.step.gradients import VisibleGradients
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.bridge.tensors.lazy import lazy_tensor
from xlatrain.bridge.tensors.live import is_live
from xlatrain.bridge.tensors.strides import Strides
from xlatrain.step.state import TrainState


class Placed(Protocol):
    """A module on a mesh, as its gradients see it."""

    params: dict[str, torch.nn.Parameter]
    strides: dict[str, Strides]
    multiprocess: bool

    @property
    def state(self) -> TrainState: ...

    @state.setter
    def state(self, state: TrainState) -> None: ...

    @property
    def raw_state(self) -> TrainState: ...

    @raw_state.setter
    def raw_state(self, state: TrainState) -> None: ...

    def name_of(self, tensor: torch.Tensor) -> str | None: ...


class ModelGradients:
    """Gradients between the steps of a run: those of a window of batches, or of manual optimization until they are cleared.

    Attributes:
        shown: those that hooks see, until they are taken over by :meth:`push`.
        differentiated: the parameters whose gradient was used up inside the last program.
        are_kept: manual optimization: what the state has accumulated stays until the user clears it.
    """

    def __init__(self, placed: Placed) -> None:
        self._placed = placed
        self.shown: VisibleGradients | None = None
        self.differentiated: frozenset[str] = frozenset()
        self.are_kept = False

    def read(self, name: str) -> torch.Tensor | None:
        """The gradient that ``p.grad`` is."""
        return self._gone(name) if name in self.differentiated else self._visible().read(name)

    def write(self, name: str, grad: torch.Tensor | None) -> None:
        """Take what user code assigns to ``p.grad``."""
        self.differentiated -= {name}
        self._visible().set(name, grad)

    def add(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Add to what ``p.grad`` shows what autograd of the host has left in a parameter, as torch does."""
        name = self._placed.name_of(param)
        if name is None or not is_live(param):
            return  # in a captured step the traced value stands for it
        with torch._C.DisableTorchFunctionSubclass():
            param.grad = None
        if self._placed.multiprocess:
            raise RuntimeError(
                f"parameter {name!r} was used outside of a step, and its gradient was computed on this process alone. Compute "
                "with it in the step (of a Fabric: in forward, in a method that model.mark_forward_method(…) names, or in a "
                "function that fabric.compile compiles), or with torch.autograd.grad"
            )
        if name not in self.differentiated:  # else the sum cannot be shown, and reading it says so
            shown = self._visible().read(name)
            self._visible().set(name, grad if shown is None else shown + grad)

    def _visible(self) -> VisibleGradients:
        """The gradients that ``p.grad`` shows: in the hooks of a step its own, outside of a step those accumulated so far."""
        if self.shown is None:
            self.shown = VisibleGradients(self._placed.state.accumulated, self._placed.state.params, self._placed.strides)
        return self.shown

    def push(self) -> None:
        """Take the gradients that ``p.grad`` shows now as those that the next step finds there."""
        if self.shown is not None:
            gradients = {name: grad for name, grad in self.shown.arrays().items() if grad is not None}
            self._placed.state = replace(self._placed.state, accumulated=gradients)
            self.shown = None

    def drop(self) -> None:
        """``p.grad`` is None for all parameters."""
        self.shown, self.differentiated = None, frozenset()
        if self._placed.raw_state.accumulated:
            self._placed.raw_state = replace(self._placed.raw_state, accumulated={})

    def begin_batch(self, batch_idx: int, accumulate: int) -> None:
        """A batch of a window of ``accumulate`` begins: the first finds no gradients, the others those of the batches before.

        Raises:
            MisconfigurationException: the window has become another one, and the gradients of the batch before are gone.
        """
        if batch_idx % accumulate == 0:
            self.drop()
        elif self.differentiated:
            raise MisconfigurationException(
                f"`accumulate_grad_batches` was set to {accumulate} before batch {batch_idx} of an epoch, in the middle of a "
                f"window of {accumulate}. Lightning adds to the gradients that the last optimizer step has used, of which a "
                "compiled step keeps none: set it as an epoch (`GradientAccumulationScheduler`) or such a window begins, "
                "override `on_before_optimizer_step`, which shows gradients, or run eagerly (XLATRAIN_EXECUTOR=eager)"
            )

    def _gone(self, name: str) -> torch.Tensor:
        """A stand-in for a gradient that never left its program: it is there, but has no values to show."""

        def raise_error() -> torch.Tensor:
            raise RuntimeError(
                f"the gradient of {name!r} was used after the update. In a compiled step it exists inside the program only, "
                "unless a hook sees gradients: use p.grad in on_after_backward, on_before_optimizer_step or "
                "configure_gradient_clipping"
            )

        param = self._placed.params[name]
        return lazy_tensor(tuple(param.shape), param.dtype, raise_error, self._placed.strides.get(name))
