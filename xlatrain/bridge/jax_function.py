"""A JAX function as an op of torch: traced by torch as one node, which is lowered to the function itself.

``xlatrain::jax_call`` gives the function's results and, where torch will differentiate, the residuals of ``jax.vjp``;
``xlatrain::jax_pullback`` makes gradients of these. So JAX differentiates what is JAX, nothing is computed twice, and torch's
autograd joins both sides. Outside of a captured step both run by XLA on the CPU.
"""

from __future__ import annotations

import functools
import itertools
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec
from torch.utils.flop_counter import register_flop_formula

from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.tensors.dtypes import jax_dtype, torch_dtype
from xlatrain.bridge.tensors.host import as_numpy, from_numpy
from xlatrain.xla import flops

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("jax_call(Tensor[] inputs, int plan) -> Tensor[]")
_LIBRARY.define("jax_pullback(Tensor[] residuals, Tensor[] cotangents, int plan) -> Tensor[]")

PureFunction = Callable[..., tuple[Sequence[Any], Sequence[Any]]]
"""``(*arrays) -> (results, auxiliary results)``: lists of arrays; gradients flow through the first alone."""

_PLANS: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class JaxFunction:
    """A pure function of arrays for tensors: :meth:`__call__` is differentiable once, in reverse.

    Args:
        function: see :data:`PureFunction`. It is traced for each combination of shapes, dtypes and wanted gradients.
    """

    def __init__(self, function: PureFunction) -> None:
        self.function = function
        self._plans: dict[Any, Plan] = {}

    def __call__(self, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results and the auxiliary results.

        Raises:
            Exception: what the function itself raises while it is traced.
        """
        grad = torch.is_grad_enabled()
        wanted = tuple(grad and one.requires_grad and one.is_floating_point() for one in inputs)
        plan = self.plan(inputs, wanted)
        found = _JaxCall.apply(plan, *inputs) if any(wanted) else torch.ops.xlatrain.jax_call(list(inputs), plan.number)
        found = list(found)  # pyright: ignore[reportArgumentType]
        return found[: plan.results], found[plan.results :]

    def plan(self, inputs: Sequence[torch.Tensor], wanted: tuple[bool, ...]) -> Plan:
        """The function for inputs of these shapes and dtypes, made when they are met first."""
        specs = tuple(map(spec_of, inputs))
        key = (wanted, tuple((spec.shape, spec.dtype) for spec in specs))
        if key not in self._plans:
            self._plans[key] = Plan(self.function, specs, wanted)
        return self._plans[key]


def spec_of(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the array that a tensor is in JAX."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax_dtype(tensor.dtype))


class CallsJax(torch.nn.Module):
    """A module whose calls are JAX functions, which have values of the host as constants."""

    @property
    def version(self) -> int:
        """A number that changes with these values. Asked before each step."""
        raise NotImplementedError

    def annotations(self) -> dict[str, PartitionSpec]:
        """The shardings that the JAX side gives its own parameters, by name."""
        raise NotImplementedError


@dataclass(eq=False)
class Plan:
    """A function for inputs of certain shapes, of some of which gradients are wanted.

    Args:
        function: see :data:`PureFunction`.
        inputs: shapes and dtypes.
        wanted: for each input whether its gradient is wanted.

    Attributes:
        number: by which ops name it.
        specs: shapes and dtypes of results, auxiliary results and residuals, in this order.
        results, auxiliary: how many there are.
    """

    function: PureFunction
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    wanted: tuple[bool, ...]

    def __post_init__(self) -> None:
        self.number = next(_numbers)
        _PLANS[self.number] = self
        self._residuals: Any = None
        self.results = self.auxiliary = 0
        self.specs: list[jax.ShapeDtypeStruct] = jax.eval_shape(self.forward, list(self.inputs))

    def forward(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Results, auxiliary results and residuals. Pure."""
        if not any(self.wanted):
            results, auxiliary = self.function(*inputs)
            self.results, self.auxiliary = len(results), len(auxiliary)
            return [*map(jnp.asarray, results), *map(jnp.asarray, auxiliary)]

        def of_wanted(*wanted: jax.Array) -> tuple[Sequence[Any], Sequence[Any]]:
            given = iter(wanted)
            return self.function(*(next(given) if flag else one for one, flag in zip(inputs, self.wanted, strict=True)))

        primals = [one for one, flag in zip(inputs, self.wanted, strict=True) if flag]
        results, pullback, auxiliary = jax.vjp(of_wanted, *primals, has_aux=True)
        self.results, self.auxiliary = len(results), len(auxiliary)
        leaves, self._residuals = jax.tree.flatten(pullback)
        return [*results, *map(jnp.asarray, auxiliary), *leaves]

    def pullback(self, residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        """Gradients of the wanted inputs. Pure."""
        specs = self.specs[: self.results]
        given = [
            cotangent.astype(spec.dtype) if jnp.issubdtype(spec.dtype, jnp.inexact) else np.zeros(spec.shape, jax.dtypes.float0)
            for cotangent, spec in zip(cotangents, specs, strict=True)
        ]
        return list(jax.tree.unflatten(self._residuals, residuals)(given))

    @functools.cached_property
    def on_cpu(self) -> tuple[Callable[..., list[jax.Array]], Callable[..., list[jax.Array]]]:
        """Both, for eager torch."""
        # without compiler_options: of eager steps, on no mesh
        return jax.jit(self.forward), jax.jit(self.pullback)


def plan_of(number: int) -> Plan:
    """The plan that a node of a graph names.

    Raises:
        RuntimeError: the module that it belonged to is gone.
    """
    if (plan := _PLANS.get(number)) is None:
        raise RuntimeError(
            f"the JAX function {number} of a captured graph is gone: keep the module that was captured as long as the graph"
        )
    return plan


class _JaxCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = torch.ops.xlatrain.jax_call(list(inputs), plan.number)
        visible = found[: plan.results + plan.auxiliary]
        ctx.plan = plan
        ctx.save_for_backward(*found[len(visible) :])
        results = visible[: plan.results]
        ctx.mark_non_differentiable(*visible[plan.results :], *(one for one in results if not one.is_floating_point()))
        return tuple(visible)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise CaptureError(
                f"{user_line(traceback.extract_stack()) or 'the step'}\n  differentiates the gradient of a JAX function "
                "(create_graph=True).\n  Fix: take both derivatives in JAX, inside of the function."
            )
        plan = ctx.plan
        found = iter(torch.ops.xlatrain.jax_pullback(list(ctx.saved_tensors), list(grads[: plan.results]), plan.number))
        return None, *(next(found) if flag else None for flag in plan.wanted)


@fake_kernel(_LIBRARY, "jax_call")
def _fake(inputs: Sequence[torch.Tensor], plan: int) -> list[torch.Tensor]:
    """Shapes of results, auxiliary results and residuals."""
    device = inputs[0].device if inputs else torch.device("cpu")
    return [torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device) for spec in plan_of(plan).specs]


@fake_kernel(_LIBRARY, "jax_pullback")
def _fake_pullback(residuals: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], plan: int) -> list[torch.Tensor]:
    """Shapes of the gradients: those of the wanted inputs."""
    found = plan_of(plan)
    device = cotangents[0].device
    wanted = [spec for spec, flag in zip(found.inputs, found.wanted, strict=True) if flag]
    return [torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=device) for spec in wanted]


@torch.library.impl(_LIBRARY, "jax_call", "CompositeExplicitAutograd")
def _eager(inputs: Sequence[torch.Tensor], plan: int) -> list[torch.Tensor]:
    return _on_cpu(plan_of(plan).on_cpu[0], inputs)


@torch.library.impl(_LIBRARY, "jax_pullback", "CompositeExplicitAutograd")
def _eager_pullback(residuals: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], plan: int) -> list[torch.Tensor]:
    return _on_cpu(plan_of(plan).on_cpu[1], residuals, cotangents)


def _on_cpu(function: Callable[..., list[jax.Array]], *lists: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a function of lists of arrays by XLA on the CPU; the tensors may be of any device that torch computes on."""
    device = next((one.device for tensors in lists for one in tensors), torch.device("cpu"))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        found = function(*([jnp.asarray(as_numpy(one.detach().cpu())) for one in tensors] for tensors in lists))
        return [from_numpy(np.array(one)).to(device) for one in found]


@register_flop_formula(torch.ops.xlatrain.jax_call, get_raw=True)
def _flops(inputs: Sequence[torch.Tensor], plan: int, **_: Any) -> int:
    """FLOPs of a function."""
    found = plan_of(plan)
    return flops.count(jax.make_jaxpr(found.forward)(list(found.inputs))).total


@register_flop_formula(torch.ops.xlatrain.jax_pullback, get_raw=True)
def _flops_pullback(residuals: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], plan: int, **_: Any) -> int:
    """FLOPs of its gradients."""
    given = [[spec_of(one) for one in tensors] for tensors in (residuals, cotangents)]
    return flops.count(jax.make_jaxpr(plan_of(plan).pullback)(*given)).total
