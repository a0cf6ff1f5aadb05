"""Calls of set-up modules on the mesh: forward and backward are programs, what lies between is plain torch on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn import Module

from torch_compat.fabric.steps import Call, ModuleCall
from torch_compat.run.batches import flatten_batch
from torch_compat.step.guards.taking import given_again
from torch_compat.step.host.scalars import ScalarTracer
from xlatrain.bridge.errors import BridgeError

if TYPE_CHECKING:
    from torch_compat.fabric.model import MeshModel


def call_on_mesh(model: MeshModel, module: Module, method: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``run(*args, **kwargs)``, the method ``method`` of ``module``, as a program; on the host where it cannot be one.

    Returns:
        What it returned, with this process's rows; differentiable where torch's would be.
    """
    try:
        return _Call(model, module, method, run, args, kwargs).result()
    except BridgeError as error:
        model.run_on_host(str(error))
        with given_again():
            return run(*args, **kwargs)


class _Call:
    """A call of a module, run as a program on the mesh."""

    def __init__(self, model: MeshModel, module: Module, method: str, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._steps = model.steps
        self._run = run
        numbers = {key: value for key, value in enumerate(args) if type(value) in (int, float)}
        numbers |= {key: value for key, value in kwargs.items() if type(value) in (int, float)}
        self._module, self._method = module, method
        self._numbers = {f"argument {key} of {method}": value for key, value in numbers.items()}
        self._batch = [args, kwargs]
        self._tensors, self._spec = flatten_batch(self._batch)
        self._trains = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        self._wanted = tuple(i for i, one in enumerate(self._tensors) if one.requires_grad) if self._trains else ()
        self._trains &= bool(self._wanted) or any(param.requires_grad for param in module.parameters())

    def result(self) -> Any:
        batch = self._spec.unflatten([tensor.detach() for tensor in self._tensors])
        called = Call(self._module, self._method, batch, self._numbers, self._user, self._wanted)
        if not self._trains:
            return self._steps.call(called).result
        call = self._steps.differentiable_call(called)
        leaves, spec = pytree.tree_flatten(call.result)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        chosen = [tensors[i] for i in call.differentiable]
        if not chosen:
            return call.result
        anchor = torch.zeros((), requires_grad=True)
        given = [self._tensors[i] for i in self._wanted]
        found = _Differentiable.apply(call, anchor, [leaves[i] for i in chosen], *given)
        for index, tensor in zip(chosen, found, strict=True):  # pyright: ignore[reportArgumentType]
            leaves[index] = tensor
        return pytree.tree_unflatten(leaves, spec)

    def _user(self, batch: Any, tracer: ScalarTracer) -> Any:
        args, kwargs = batch
        args = [self._number(key, value, tracer) for key, value in enumerate(args)]
        return self._run(*args, **{key: self._number(key, value, tracer) for key, value in kwargs.items()})

    def _number(self, key: Any, value: Any, tracer: ScalarTracer) -> Any:
        name = f"argument {key} of {self._method}"
        return tracer.counter(name) if name in self._numbers else value


class _Differentiable(torch.autograd.Function):
    """The results of an executed call; its backward pass is another program."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, call: ModuleCall, anchor: Tensor, results: Sequence[Tensor], *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(anchor, *given)  # so that using the graph twice, or changed arguments, are torch's errors
        return tuple(result.clone() for result in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: what came out would count as constant
            raise RuntimeError(
                "a call of a set-up module can be differentiated once: for create_graph=True (a gradient penalty) compile the "
                "whole step, fabric.compile(step), or run eagerly (XLATRAIN_EXECUTOR=eager)"
            )
        assert ctx.saved_tensors is not None
        return (None, None, None, *ctx.call.backward(cotangents))
