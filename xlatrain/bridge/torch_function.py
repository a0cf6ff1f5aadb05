"""A torch module as a JAX function of its parameters."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._pytree as pytree
from jax.custom_derivatives import zero_from_primal
from torch.nn.utils.stateless import _reparametrize_module

from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.gradients import gradients_of
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.tensors.dtypes import torch_dtype
from xlatrain.bridge.tensors.host import as_numpy

Apply = Callable[..., Any]
"""``(params, *args, key=None)``: the module's call."""


def to_jax(module: torch.nn.Module, *example: Any) -> tuple[dict[str, jax.Array], Apply]:
    """The parameters of a torch module as arrays by name, and its call as a function of them.

    ::

        params, apply = to_jax(model, torch.zeros(8, 3, 32, 32))
        logits = jax.jit(apply)(params, images)
        grads = jax.grad(lambda p: loss(apply(p, images), labels))(params)

    ``apply`` may be jitted, vmapped, and differentiated once in reverse; gradients are torch's own (``no_grad``, custom
    Functions, hooks), and its forward is computed again for them, as by ``jax.checkpoint``, where XLA does not see that both are
    the same. It is captured once for each combination of shapes and dtypes.

    Buffers are constants, as they are now. Dropout and other draws need ``key=jax.random.key(seed)``, and equal keys draw the
    same; call ``module.eval()`` before for a module without them. The numbers are not those of torch's generator.

    Args:
        module: on the host; ``training`` counts as it is now.
        *example: arguments of its call, arrays or tensors in any nesting: it is captured for their shapes at once, so that errors
            come here. What is neither is a constant.

    Returns:
        The parameters (tied ones once) and the function, whose results are in the places of the module's.

    Raises:
        CaptureError: the module cannot be captured; it writes into buffers.
    """
    params = {name: jnp.asarray(as_numpy(param.detach())) for name, param in module.named_parameters()}
    captures = _Captures(module)

    def apply(params: Mapping[str, jax.Array], *args: Any, key: jax.Array | None = None) -> Any:
        if params.keys() != captures.params.keys():
            differ = sorted(params.keys() ^ captures.params.keys())
            raise ValueError(f"apply was given other parameters than {type(module).__name__} has; they differ in {differ}")
        leaves, structure = jax.tree.flatten(args)
        places = tuple(_spec(leaf) if _is_array(leaf) else leaf for leaf in leaves)
        run = captures.function(places, structure)
        arrays = [jnp.asarray(as_numpy(leaf) if isinstance(leaf, torch.Tensor) else leaf) for leaf in leaves if _is_array(leaf)]
        return run([params[name] for name in captures.params], arrays, key)

    leaves, structure = jax.tree.flatten(example)
    captures.function(tuple(_spec(leaf) if _is_array(leaf) else leaf for leaf in leaves), structure)
    return params, apply


_Tensors = Sequence[torch.Tensor]


class _Captures:
    """The captures of a module, by the shapes of its arguments."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.params = {name: _like(param) for name, param in module.named_parameters()}
        self._buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._functions: dict[Any, Callable[..., Any]] = {}

    def function(self, places: tuple[Any, ...], structure: Any) -> Callable[..., Any]:
        """The function of parameters, arrays and key for arguments with these places."""
        key = (places, structure)
        if key not in self._functions:
            self._functions[key] = self._capture(places, structure)
        return self._functions[key]

    def _capture(self, places: tuple[Any, ...], structure: Any) -> Callable[..., Any]:
        names = list(self.params)
        specs = [torch.empty(one.shape, dtype=torch_dtype(one.dtype), device="meta") for one in places if _is_spec(one)]
        result: Any = None

        def placed(params: _Tensors, buffers: _Tensors) -> AbstractContextManager[None]:
            state = {**dict(zip(names, params, strict=True)), **dict(zip(self._buffers, buffers, strict=True))}
            return _reparametrize_module(self._module, state, tie_weights=True)

        def call(leaves: _Tensors) -> list[torch.Tensor]:
            nonlocal result
            given = iter(leaves)
            args = jax.tree.unflatten(structure, [next(given) if _is_spec(one) else one for one in places])
            value = self._module(*args)
            found, result = pytree.tree_flatten(value)
            if others := sorted({type(one).__name__ for one in found if not isinstance(one, torch.Tensor)}):
                raise CaptureError(
                    f"{type(self._module).__name__} returned values of type {', '.join(others)}; expected tensors in any "
                    "nesting. Wrap it in a module that returns tensors alone"
                )
            return found

        def forward(params: Any, buffers: Any, leaves: Any) -> Any:
            with placed(params, buffers):
                found = call(leaves)
            return found, list(buffers)

        def backward(params: Any, buffers: Any, leaves: Any, cotangents: Any) -> Any:
            params = [one.detach().requires_grad_(flag) for one, flag in zip(params, flags, strict=True)]
            leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in leaves]
            inputs = [one for one in (*params, *leaves) if one.requires_grad]
            given = [one for one, flag in zip(cotangents, differentiable, strict=True) if flag]
            with placed(params, buffers):  # the backward of a Function may call the module, too
                found = [one for one in call(leaves) if one.requires_grad]
                grads = iter(gradients_of(found, inputs, given))
            every = [next(grads) if one.requires_grad else None for one in (*params, *leaves)]
            return [torch.zeros_like(one) if grad is None else grad for one, grad in zip((*params, *leaves), every, strict=True)]

        flags = [param.requires_grad for param in self._module.parameters()]
        templates, buffers = list(self.params.values()), [_like(one) for one in self._buffers.values()]
        with torch.no_grad():
            graph = capture(forward, templates, buffers, specs)
        _refuse_writes(graph, list(self._buffers), len(names), type(self._module).__name__)
        structure_of_result, count = result, len(graph.outputs) - len(buffers)
        outputs = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in graph.outputs[:count]]
        differentiable: list[bool] = []

        def flags_of_outputs(params: Any, buffers: Any, leaves: Any) -> Any:
            params = [one.detach().requires_grad_(flag) for one, flag in zip(params, flags, strict=True)]
            with placed(params, buffers):
                found = call([one.detach().requires_grad_(one.is_floating_point()) for one in leaves])
            differentiable[:] = [one.requires_grad for one in found]
            return found

        with torch.enable_grad():
            capture(flags_of_outputs, templates, buffers, specs)
            gradients = capture(backward, templates, buffers, specs, outputs) if any(differentiable) else None
        constants = [as_numpy(one) for one in self._buffers.values()]
        return _differentiable(graph, gradients, constants, count, structure_of_result)


def _differentiable(graph: Capture, gradients: Capture | None, buffers: Sequence[np.ndarray], count: int, shape: Any) -> Any:
    """The captured call as a function of parameters, arrays and key, whose gradients are the captured ones."""
    lowered, pullback = lower(graph), None if gradients is None else lower(gradients)

    @jax.custom_vjp
    def run(params: list[jax.Array], leaves: list[jax.Array], key: jax.Array | None) -> list[jax.Array]:
        if graph.uses_random and key is None:
            raise ValueError(
                "the module draws random numbers (dropout): pass key=jax.random.key(seed), or call module.eval() before"
            )
        return lowered([*params, *buffers, *leaves], key)[:count]

    def forward(params: list[jax.Array], leaves: list[jax.Array], key: jax.Array | None) -> Any:
        return run(params, leaves, key), (params, leaves, key)

    def backward(kept: Any, cotangents: list[jax.Array]) -> Any:
        params, leaves, key = kept
        given = [np.zeros(x.shape, np.float32) if x.dtype == jax.dtypes.float0 else x for x in cotangents]
        every = [*params, *leaves]
        found = (
            [jnp.zeros_like(one) for one in every] if pullback is None else pullback([*params, *buffers, *leaves, *given], key)
        )
        grads = [
            grad if jnp.issubdtype(one.dtype, jnp.inexact) else zero_from_primal(one)
            for one, grad in zip(every, found, strict=True)
        ]
        return grads[: len(params)], grads[len(params) :], None if key is None else zero_from_primal(key)

    run.defvjp(forward, backward)

    def call(params: list[jax.Array], leaves: list[jax.Array], key: jax.Array | None) -> Any:
        return pytree.tree_unflatten(run(params, leaves, key), shape)

    return call


def _refuse_writes(graph: Capture, buffers: Sequence[str], first: int, name: str) -> None:
    """Raises:
    CaptureError: the graph gives other values of buffers than it was given.
    """
    nodes = list(graph.graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"][first : first + len(buffers)]
    returned = [_source(node) for node in nodes[-1].args[0][len(graph.outputs) - len(buffers) :]]
    written = [one for one, given, now in zip(buffers, placeholders, returned, strict=True) if given is not now]
    if written:
        raise CaptureError(
            f"{user_line(traceback.extract_stack()) or name}\n  {name} writes into its buffers ({', '.join(written[:5])}), as "
            "batch norm does in training, and a JAX function has nowhere to keep them.\n  Fix: call module.eval() before to_jax."
        )


def _source(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose value ``node`` gives as it is."""
    while node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        node = node.all_input_nodes[0]
    return node


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype without values."""
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, torch.Tensor, jax.ShapeDtypeStruct))


def _is_spec(place: Any) -> bool:
    return isinstance(place, jax.ShapeDtypeStruct)


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = as_numpy(torch.empty(0, dtype=leaf.dtype)).dtype if isinstance(leaf, torch.Tensor) else leaf.dtype
    return jax.ShapeDtypeStruct(tuple(leaf.shape), jax.dtypes.canonicalize_dtype(dtype))
