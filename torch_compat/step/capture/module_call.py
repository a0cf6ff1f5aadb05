"""Bodies of a module's call, and of its backward pass, for loops that call modules themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_compat.run.batches import flatten_batch
from torch_compat.step.capture.step_capture import Grads, StepBody, StepInputs
from torch_compat.step.capture.step_trace import StepTrace
from torch_compat.step.guards.ahead_of_time import ahead_of_time
from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.scalars import ScalarTracer
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.gradients import gradients_of


def call_body(wanted: Sequence[int]) -> StepBody:
    """The body of a call of a module whose outputs may be differentiated on the host, by :func:`call_backward_body`.

    Args:
        wanted: the batch's tensors, by position, that require gradients.
    """

    def body(inputs: StepInputs, trace: StepTrace, values: Mapping[str, torch.Tensor], batch: Any, tracer: ScalarTracer) -> Grads:
        batch, _ = _requiring_grad(batch, wanted)
        trace.keeps_own = False  # the result is part of a graph on the host
        trace.result = inputs.call(batch, tracer)
        return {}

    return body


def call_backward_body(wanted: Sequence[int]) -> StepBody:
    """The body of the backward pass of a module's call, which computes the call again.

    The batch is ``(the call's batch, cotangents of its differentiable results)``. ``grads`` are those of the parameters, the
    result is the list of those of the ``wanted`` tensors, None where the results do not depend on one.
    """

    def body(inputs: StepInputs, trace: StepTrace, values: Mapping[str, torch.Tensor], batch: Any, tracer: ScalarTracer) -> Grads:
        arguments, cotangents = batch
        trace.writes = False  # the call has
        arguments, given = _requiring_grad(arguments, wanted)
        result = inputs.call(arguments, tracer)
        found = [leaf for leaf in pytree.tree_leaves(result) if is_traced(leaf) and leaf.requires_grad]
        names = [name for name, value in values.items() if value.requires_grad]
        inner = [*(values[name] for name in names), *given]
        if trace.hooks.on_nodes:
            raise CaptureError(
                "a parameter has a hook of register_post_accumulate_grad_hook, of register_multi_grad_hook, or on the node that "
                "adds to its gradient, which the backward pass of a single call cannot run.\n  Fix: register_hook, or compile "
                "the whole step: fabric.compile(step)."
            )
        with ahead_of_time(_refusal):
            grads = gradients_of(found, inner, cotangents)
        trace.result = grads[len(names) :]
        return dict(zip(names, grads[: len(names)], strict=True))

    return body


def _refusal(what: str) -> CaptureError:
    return CaptureError(
        f"the backward pass of a module's call {what}, which is captured before it would run.\n  Fix: compile the whole step: "
        "fabric.compile(step)."
    )


def _requiring_grad(batch: Any, wanted: Sequence[int]) -> tuple[Any, list[torch.Tensor]]:
    """The batch with its ``wanted`` tensors (by position) detached and requiring gradients, and these tensors."""
    if not wanted:
        return batch, []
    leaves, spec = flatten_batch(batch)
    for index in wanted:
        leaves[index] = leaves[index].detach().requires_grad_(True)
    return spec.unflatten(leaves), [leaves[index] for index in wanted]
