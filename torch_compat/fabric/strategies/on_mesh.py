"""Operations of strategies on modules and optimizers that a Fabric has on its mesh, eagerly or during a capture."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from torch_compat.utilities.host_arrays import host_value
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.lazy_init import SkippedInitializers
from xlatrain.bridge.tensors.live import live_array
from xlatrain.step.clipping import clip_by_norm, clip_by_value

if TYPE_CHECKING:
    from torch_compat.fabric.model import MeshModel
    from torch_compat.strategies.strategy import Strategy as MeshStrategy


@contextlib.contextmanager
def init_context(mesh: MeshStrategy, empty_init: bool | None) -> Iterator[None]:
    """The context in which parameters get their values on their shards; without values of their own if ``empty_init``."""
    skipped: AbstractContextManager[Any] = SkippedInitializers() if empty_init else contextlib.nullcontext()
    with mesh.model_sharded_context(), skipped:
        yield


def optimizer_step(model: MeshModel, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
    """Update parameters: on the mesh, inside of a captured step, or on the host if the optimizer has no pure form."""
    if model.tracer is not None:
        if model.index_of(optimizer) is None:
            raise CaptureError(model.why_unsupported(optimizer))
        return optimizer.step(**_with(closure, kwargs))
    if model.on_host:
        return optimizer.step(**_with(closure, kwargs))
    steps = model.steps
    index = model.index_of(optimizer)
    if index is None or kwargs:
        return optimizer.step(**_with(closure, kwargs))
    try:
        model.check_optimizers()
    except CaptureError as error:
        model.run_on_host(str(error))
        return optimizer.step(**_with(closure, kwargs))
    result = None
    if closure is not None:
        with torch.enable_grad():
            result = closure()
    steps.update(index, model.optimizer_set)
    return result


def _with(closure: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if closure is None else {**kwargs, "closure": closure}


def clip_norm(
    model: MeshModel, parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over the gradients of ``parameters``."""
    if model.tracer is not None:
        return _captured_clip(model, parameters, max_norm, norm_type, error_if_nonfinite)
    if model.on_host or model.placed is None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    state, names = _gradients(model, parameters)
    clipped, norm = _clip_norm({name: state.accumulated[name] for name in names}, max_norm, float(norm_type))
    total = torch.tensor(float(host_value(norm)))
    if error_if_nonfinite:
        _check_finite(total, norm_type)
    model.placed.state = replace(state, accumulated={**state.accumulated, **clipped})
    return total


def _captured_clip(
    model: MeshModel, parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=False, foreach=False)
    if error_if_nonfinite and model.recorder is not None:
        model.recorder.calls.record(_check_finite, (norm.detach(), norm_type), text="clip_gradients", state=None)
    return norm


def _check_finite(norm: Tensor, norm_type: float) -> None:
    if not math.isfinite(float(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite ({float(norm)}), so it cannot be clipped. To go on "
            "and clip it all the same, pass error_if_nonfinite=False"
        )


def clip_value(model: MeshModel, parameters: Sequence[Tensor], clip_val: float) -> None:
    """``torch.nn.utils.clip_grad_value_`` over the gradients of ``parameters``."""
    if model.tracer is not None:
        torch.nn.utils.clip_grad_value_(parameters, clip_val, foreach=False)
        return
    if model.on_host or model.placed is None:
        torch.nn.utils.clip_grad_value_(parameters, clip_val)
        return
    state, names = _gradients(model, parameters)
    clipped = _clip_value({name: state.accumulated[name] for name in names}, clip_val)
    model.placed.state = replace(state, accumulated={**state.accumulated, **clipped})


def _gradients(model: MeshModel, parameters: Sequence[Tensor]) -> Any:
    """The state with everything in it that ``p.grad`` shows, and the names of those of ``parameters`` that have a gradient."""
    placed = model.placed
    assert placed is not None
    placed.gradients.push()
    names = [placed.name_of(parameter) for parameter in parameters]
    return placed.state, [name for name in names if name in placed.state.accumulated]


@functools.partial(jax.jit, static_argnums=2)  # without compiler_options: norms of gradients alone
def _clip_norm(grads: dict[str, jax.Array], max_norm: Any, norm_type: float) -> Any:
    return clip_by_norm(grads, max_norm, norm_type)


@jax.jit  # without compiler_options: element by element
def _clip_value(grads: dict[str, jax.Array], clip_val: Any) -> Any:
    return clip_by_value(grads, clip_val)


def module_state(module: Module) -> dict[str, Any]:
    """``module.state_dict()``: what is on the mesh comes as it is, to be saved shard by shard."""
    found = module.state_dict(keep_vars=True)
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    return value if not isinstance(value, Tensor) or live_array(value) is not None else value.detach()
