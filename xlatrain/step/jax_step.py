"""The steps of a :class:`~xlatrain.step.jax_module.JaxModule` while JAX traces them, and what its class defines."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xlatrain.step.jax_module import JaxModule, StepTrace

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
REFUSED = {
    "of gradients, which the compiled step has inside: transform them in the optimizer (optax.chain)": (
        *("backward", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
        *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "manual_backward"),
    ),
    "of torch's schedulers: a schedule is part of the optax transformation": ("lr_scheduler_step", "lr_schedulers"),
    "of older versions of Lightning": (
        *("training_epoch_end", "validation_epoch_end", "test_epoch_end", "configure_sharded_model", "training_step_end"),
        *("validation_step_end", "test_step_end", "on_epoch_start", "on_epoch_end", "on_batch_start", "on_batch_end"),
    ),
    "of torch's modules": ("on_validation_model_eval", "on_validation_model_train", "on_test_model_eval", "on_test_model_train"),
}
"""Methods that no JAX module may have, by what they are."""


class TracedStep(NamedTuple):
    """The results of a step.

    Attributes:
        loss: floating scalar; None of other steps than ``training_step``.
        output: what else it returned, a pytree of arrays; None of a ``training_step`` that returned the loss alone.
        logged: name, value and options of what it logged.
    """

    loss: Any
    output: Any
    logged: list[tuple[str, Any, dict[str, Any]]]


def trace_step(module: Any, name: str, batch: Any, counters: Mapping[str, Any], dataloader_idx: int = 0) -> TracedStep:
    """Call the step ``name`` of a module whose variables are traced.

    Args:
        module: may be changed in its variables.
        name: of :data:`STEPS`.
        batch: a pytree of arrays.
        counters: int32 scalars by name: ``batch_idx`` where the step takes it, ``global_step`` and ``current_epoch``.
        dataloader_idx: a constant of the program.

    Raises:
        TypeError: ``training_step`` gives no loss.
        CounterWanted: it asks for a counter that is not there.
    """
    trace = StepTrace(counters)
    indices = (counters.get("batch_idx"), dataloader_idx)[: max(accepted(type(module), name) - 1, 0)]
    with trace.running():
        output = getattr(module, name)(batch, *indices)
    if name != "training_step":
        return TracedStep(None, output, trace.logged)
    loss, output = (output.get("loss"), dict(output)) if isinstance(output, Mapping) else (output, {})
    output.pop("loss", None)
    _check_loss(loss, module)
    return TracedStep(loss, output, trace.logged)


def has(kind: type, name: str) -> bool:
    """Whether a class of JAX modules defines a method that :class:`JaxModule` does not, or another than its own."""
    return callable(getattr(kind, name, None)) and getattr(kind, name) is not getattr(JaxModule, name, None)


def accepted(kind: type, name: str) -> int:
    """The number of positional arguments of a method, without ``self``."""
    parameters = inspect.signature(getattr(kind, name)).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 3
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters) - 1


def where(module: Any, name: str) -> str:
    """``file:line: Class.method`` of a method of the user's."""
    function = getattr(type(module), name)
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}: "
    return f"{place}{type(module).__name__}.{name}"


def _check_loss(loss: Any, module: Any) -> None:
    """Raises:
    TypeError: it is no floating scalar.
    """
    if isinstance(loss, jax.Array) and loss.shape == () and jnp.issubdtype(loss.dtype, jnp.floating):
        return
    found = f"{loss.dtype}{list(loss.shape)}" if isinstance(loss, jax.Array) else type(loss).__name__
    raise TypeError(
        f"{where(module, 'training_step')} returned {found}; expected the loss, a floating scalar array, or a dict with 'loss': "
        "take the mean over the batch"
    )
