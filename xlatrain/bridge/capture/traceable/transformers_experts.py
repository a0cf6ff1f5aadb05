"""Mixtures of experts of the ``transformers`` library while a step is captured for a mesh.

The library sorts the tokens of the whole batch by expert. On a mesh that would gather them on every device, once for each
layer. Here a layer's experts are one op, ``xlatrain::experts``, which is lowered to a sort of each device's own tokens; where the
mesh has an axis ``expert``, each device has some of the experts, and tokens go to them and back (``lower/lowerings/experts.py``).

The op takes experts whose activation is known. Others stay as the library computes them, and no plan splits them over ``expert``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jax.sharding import Mesh
from torch.utils.flop_counter import register_flop_formula

from xlatrain.bridge.capture.activations import MESHES
from xlatrain.bridge.capture.attention import inside_functorch
from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.patches import patched
from xlatrain.mesh.mesh import EXPERT_AXIS, data_parallel_size, sequence_parts
from xlatrain.mesh.sharding import PlannedSplit

_ARGUMENTS = (
    "Tensor x, Tensor index, Tensor weights, Tensor up, Tensor down, str activation, bool gated, bool transposed, int mesh"
)
_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define(f"experts({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"experts_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")

_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "ReLU": "relu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}
"""Class of a module → the activation that the op knows by this name."""


@fake_kernel(_LIBRARY, "experts")
def _fake(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *_: Any
) -> torch.Tensor:
    """(tokens, features), in the dtype of the weighted sum."""
    return x.new_empty(x.shape, dtype=torch.promote_types(down.dtype, weights.dtype))


@fake_kernel(_LIBRARY, "experts_backward")
def _fake_backward(
    grad: torch.Tensor, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients by ``x``, ``weights``, ``up`` and ``down``."""
    return tuple(torch.empty_like(one, memory_format=torch.contiguous_format) for one in (x, weights, up, down))


@register_flop_formula(torch.ops.xlatrain.experts)
def _flops(x: Any, index: Any, weights: Any, up: Any, down: Any, *_: Any, **__: Any) -> int:
    """FLOPs of each token through its chosen experts, by shapes."""
    return 2 * torch.Size(index).numel() * (torch.Size(up[1:]).numel() + torch.Size(down[1:]).numel())


@register_flop_formula(torch.ops.xlatrain.experts_backward)
def _flops_backward(grad: Any, *args: Any, **_: Any) -> int:
    """FLOPs of the gradients by tokens and by weights."""
    return 2 * _flops(*args)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.activation, ctx.gated, ctx.transposed, ctx.mesh = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    known = (ctx.activation, ctx.gated, ctx.transposed, ctx.mesh)
    x, weights, up, down = torch.ops.xlatrain.experts_backward(grad, *ctx.saved_tensors, *known)
    return x, None, weights, up, down, None, None, None, None


torch.library.register_autograd("xlatrain::experts", _backward, setup_context=_save, lib=_LIBRARY)


@contextlib.contextmanager
def routed_experts(mesh: Mesh) -> Iterator[None]:
    """Compute experts by ``xlatrain::experts`` in steps captured in the block, on a mesh that splits batches."""
    moe: Any = sys.modules.get("transformers.integrations.moe")
    parts = data_parallel_size(mesh) * sequence_parts(mesh)
    if parts == 1 or not hasattr(moe, "ExpertsInterface"):
        yield
        return
    if mesh not in MESHES:
        MESHES.append(mesh)
    number, dispatch = MESHES.index(mesh), moe.ExpertsInterface.get_interface

    def get_interface(interface: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found = dispatch(interface, implementation, default)

        def forward(self: torch.nn.Module, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            kind = _activation(self)
            if kind is None or inside_functorch() or x.ndim != 2 or x.shape[0] % parts:
                return found(self, x, index, weights)
            up, down = _projections(self)
            sizes = (kind, bool(self.has_gate), bool(self.is_transposed), number)
            return torch.ops.xlatrain.experts(x.to(up.dtype), index, weights, up, down, *sizes).to(x.dtype)

        return forward

    with patched([(moe.ExpertsInterface, "get_interface", get_interface)]):
        yield


def expert_splits(module: torch.nn.Module, mesh: Mesh, planned: dict[str, PlannedSplit]) -> dict[str, PlannedSplit]:
    """``planned`` with the parameters of experts that the op computes split over the axis ``expert``, by their first dim.

    Raises:
        ValueError: the axis does not divide the number of experts; names the module.
    """
    size = dict(mesh.shape).get(EXPERT_AXIS, 1)
    found = dict(planned)
    for prefix, child in module.named_modules() if size > 1 else ():
        if _activation(child) is None:
            continue
        for name, param in child.named_parameters(recurse=False):
            if param.shape[0] % size:
                raise ValueError(
                    f"mesh axis {EXPERT_AXIS!r} of size {size} does not divide the {param.shape[0]} experts of {prefix!r} "
                    f"({type(child).__name__}): take one of the sizes {_divisors(param.shape[0])}"
                )
            path = f"{prefix}.{name}" if prefix else name
            before = planned.get(path)
            source = f"{type(child).__name__} {name!r} by expert"
            found[path] = PlannedSplit(None if before is None else before.dim, source, expert=0)
    return found


def _divisors(count: int) -> list[int]:
    return [size for size in range(2, count + 1) if count % size == 0]


def _activation(module: Any) -> str | None:
    """The name of a module's activation, if it is one of experts that the op computes; else None."""
    if not all(hasattr(module, name) for name in ("num_experts", "has_gate", "is_concatenated", "has_post_expert_norm")):
        return None
    moe: Any = sys.modules["transformers.integrations.moe"]
    others = (module.has_bias, module.has_post_expert_norm, not module.is_concatenated)
    own_gate = module.has_gate and module._apply_gate.__func__ is not moe._default_apply_gate
    if any(others) or own_gate or not all(isinstance(one, torch.Tensor) and one.ndim == 3 for one in _projections(module)):
        return None
    return _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)


def _projections(module: Any) -> tuple[Any, Any]:
    return (module.gate_up_proj if module.has_gate else module.up_proj), module.down_proj
