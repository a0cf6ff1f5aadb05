"""Bodies of a user's step methods: training with automatic or manual optimization, evaluation."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_compat.step.capture.loss import closure_loss, outputs_with
from torch_compat.step.capture.step_capture import Grads, StepBody, StepInputs
from torch_compat.step.capture.step_trace import StepTrace
from torch_compat.step.capture.watched_backward import WatchedBackward
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.host.slots import ValueSlot
from torch_compat.utilities.exceptions import MisconfigurationException, SetupRuntimeError
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.gradients import gradients_of, sums_of
from xlatrain.bridge.patches import patched


def training_body(accumulate: int) -> StepBody:
    """The body of an automatically optimized training step: forward and backward.

    Args:
        accumulate: the loss is divided by this number of accumulated batches, as Lightning does, before the backward pass.

    Raises:
        MisconfigurationException: ``training_step`` returned something else than a loss, a dict with ``"loss"``, or None.
    """

    def body(inputs: StepInputs, trace: StepTrace, values: Mapping[str, torch.Tensor], batch: Any, tracer: ScalarTracer) -> Grads:
        watched = WatchedBackward(trace.hooks)
        watched.refuse_accumulated(accumulate)
        with _earlier_gradients_refused(values), watched.noting():
            output = inputs.call(batch, tracer)
        _drop_gradients(values, accumulate)
        loss = closure_loss(output)
        wanted = [name for name, value in values.items() if value.requires_grad]
        if loss is None:
            trace.result = {}
            return dict.fromkeys(wanted)
        objective = loss / accumulate
        seen = ValueSlot("scalars", trace.logs.add(objective)) if loss.dtype == torch.float32 and loss.ndim == 0 else objective
        trace.result = outputs_with(seen, output)
        if not loss.requires_grad:
            raise SetupRuntimeError(
                "element 0 of tensors does not require grad and does not have a grad_fn: the loss returned by training_step does "
                "not depend on any parameter that requires grad, so there is nothing to train. Look for a detach(), a "
                "no_grad block, or frozen parameters."
            )
        scaled = objective if tracer.loss_scale is None else tracer.loss_scale.scale_loss(objective)
        inner = [values[name] for name in wanted]
        with inputs.around_backward():
            if inputs.backward is not None:
                grads = _through(inputs.backward, scaled, inner, watched)
            elif watched.needed_for(scaled, inner):
                scaled.backward()
                grads = [value.grad for value in inner]
            else:
                grads = gradients_of([scaled], inner)
        return dict(zip(wanted, grads, strict=True))

    return body


@contextlib.contextmanager
def _earlier_gradients_refused(values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Refuse reading gradients in ``training_step``, where under stock parameters still have those of the step before.

    Raises:
        CaptureError: where the step asks for one.
    """
    names = {id(value): name for name, value in values.items()}

    def get(tensor: torch.Tensor) -> torch.Tensor | None:
        grad = _GRAD.__get__(tensor)
        if grad is None and id(tensor) in names:
            raise CaptureError(
                f"{user_line(traceback.extract_stack()) or 'training_step'}\n  cannot be captured: it reads the gradient of "
                f"{names[id(tensor)]!r}, which is that of the step before.\n  Fix: read it in on_before_optimizer_step or "
                "on_after_backward."
            )
        return grad

    with patched((kind, "grad", property(get, _GRAD.__set__)) for kind in (FunctionalTensor, FakeTensor)):
        yield


def _drop_gradients(values: Mapping[str, torch.Tensor], accumulate: int) -> None:
    """Drop the gradients that ``training_step`` itself made, as ``zero_grad()`` does, which comes between it and the backward.

    Raises:
        CaptureError: there are some, and batches are accumulated: only the first of them has a ``zero_grad()``.
    """
    for name, value in values.items():
        if value.grad is not None and accumulate > 1:
            raise CaptureError(
                f"training_step runs a backward pass of its own, which leaves a gradient in {name!r}: with "
                f"accumulate_grad_batches={accumulate} the first batch's is dropped by zero_grad(), those of the others count, "
                "which a compiled step does not follow.\n  Fix: torch.autograd.grad, or manual optimization."
            )
        value.grad = None


_GRAD = torch._C.TensorBase.__dict__["grad"]


def updating_body(
    inputs: StepInputs, trace: StepTrace, values: Mapping[str, torch.Tensor], batch: Any, tracer: ScalarTracer
) -> Grads:
    """The body of a training step that runs backward and its optimizers itself (manual optimization).

    Gradients are what ``.grad`` of the parameters is at its end.
    """
    trace.result = inputs.call(batch, tracer)
    return {name: value.grad for name, value in values.items()}


def _through(
    backward: Callable[[torch.Tensor, Callable[..., None]], Any],
    loss: torch.Tensor,
    values: Sequence[torch.Tensor],
    watched: WatchedBackward,
) -> list[torch.Tensor | None]:
    """The gradients of everything that the user's own backward differentiates, added up, one for each of ``values``.

    None where there is none. ``loss`` is a scalar.
    """
    grads: list[torch.Tensor | None] = [None] * len(values)

    def add(found: Sequence[torch.Tensor | None]) -> None:
        grads[:] = sums_of(grads, found)

    def differentiate(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if args or set(kwargs) - {"retain_graph"}:
            raise MisconfigurationException(
                f"backward was given {[*args, *kwargs]}: a compiled step differentiates the loss itself; retain_graph at most"
            )
        if watched.needed_for(loss, values):
            loss.backward(retain_graph=True)
        else:
            add(torch.autograd.grad(loss, values, allow_unused=True, retain_graph=True))

    backward(loss, differentiate)
    add([value.grad for value in values])  # what loss.backward() left
    return grads


def evaluation_body(
    inputs: StepInputs, trace: StepTrace, values: Mapping[str, torch.Tensor], batch: Any, tracer: ScalarTracer
) -> Grads:
    """The body of a validation, test or predict step, which runs without gradients."""
    trace.result = inputs.call(batch, tracer)
    return {}
