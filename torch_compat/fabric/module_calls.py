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
from torch_compat.step.host.scalars import ScalarTracer

if TYPE_CHECKING:
    from torch_compat.fabric.model import MeshModel


def call_on_mesh(model: MeshModel, module: Module, method: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``run(*args, **kwargs)``, the method ``method`` of ``module``, as a program; on the host where it cannot be one.

    Returns:
        What it returned, with this process's rows; differentiable where torch's would be.
    """
    try:
        return _Call(model, module, method, run, args, kwargs).result()
    except Exception as error:
        return model.run_again(error, lambda: run(*args, **kwargs))


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
        # The backward program runs the hooks that parameters have of the user; torch would call them again, without a gradient.
        params = [param for param in self._module.parameters() if param.requires_grad and not param._backward_hooks]
        given = [torch.zeros((), requires_grad=True), *params, *(self._tensors[i] for i in self._wanted)]
        found = _Differentiable.apply(self, call, chosen, [leaves[i] for i in chosen], len(params), *given)
        for index, tensor in zip(chosen, found, strict=True):  # pyright: ignore[reportArgumentType]
            leaves[index] = tensor
        return pytree.tree_unflatten(leaves, spec)

    def differentiable_gradients(
        self,
        call: ModuleCall,
        chosen: Sequence[int],
        cotangents: Sequence[Tensor],
        params: Sequence[Tensor],
        given: Sequence[Tensor],
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of parameters and arguments with a graph of their own: torch computes the call again, on the host.

        Raises:
            RuntimeError: see :func:`~torch_compat.fabric.steps.refuse_again`; or parameters have changed since.
        """
        assert call.check_again is not None
        call.check_again()
        tensors = list(self._tensors)
        for index, tensor in zip(self._wanted, given, strict=True):
            tensors[index] = tensor
        args, kwargs = self._spec.unflatten(tensors)
        leaves = pytree.tree_leaves(self._run(*args, **kwargs))
        grads = torch.autograd.grad(
            [leaves[i] for i in chosen], [*params, *given], list(cotangents), create_graph=True, allow_unused=True
        )
        return list(grads[: len(params)]), list(grads[len(params) :])

    def _user(self, batch: Any, tracer: ScalarTracer) -> Any:
        args, kwargs = batch
        args = [self._number(key, value, tracer) for key, value in enumerate(args)]
        return self._run(*args, **{key: self._number(key, value, tracer) for key, value in kwargs.items()})

    def _number(self, key: Any, value: Any, tracer: ScalarTracer) -> Any:
        name = f"argument {key} of {self._method}"
        return tracer.counter(name) if name in self._numbers else value


class _Differentiable(torch.autograd.Function):
    """The results of an executed call; its backward pass is another program, or torch's own where that is differentiated again.

    The anchor stands for ``p.grad`` of all parameters, which a ``backward()`` fills on the mesh. The parameters are inputs too,
    for who asks for their gradients.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, owner: _Call, call: ModuleCall, chosen: Sequence[int], results: Sequence[Tensor], params: int, *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.owner, ctx.call, ctx.chosen = owner, call, chosen
        ctx.params = given[1 : 1 + params]
        ctx.save_for_backward(given[0], *given[1 + params :])  # so that changed arguments, or a second use, are torch's errors
        return tuple(result.clone() for result in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        with torch._C._EnableTorchFunction():  # autograd.grad of a live parameter runs without, and tensors read later need it
            return _Differentiable._gradients(ctx, cotangents)

    @staticmethod
    def _gradients(ctx: Any, cotangents: Sequence[Tensor]) -> Any:
        assert ctx.saved_tensors is not None
        _, *given = ctx.saved_tensors
        anchor, *nodes = (node for node, _ in ctx.next_functions)
        wanted = [param for param, node in zip(ctx.params, nodes, strict=False) if _is_wanted(node)]
        if torch.is_grad_enabled():
            of_params, of_given = ctx.owner.differentiable_gradients(ctx.call, ctx.chosen, cotangents, wanted, given)
        elif _is_wanted(anchor):
            wanted, (of_params, of_given) = [], ctx.call.backward(cotangents, None)
        else:
            of_params, of_given = ctx.call.backward(cotangents, wanted)
        found = {id(param): grad for param, grad in zip(wanted, of_params, strict=True)}
        return (*[None] * 6, *(found.get(id(param)) for param in ctx.params), *of_given)


def _is_wanted(node: Any) -> bool:
    """Whether the backward pass that runs fills the gradient of a leaf, or returns it."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch does not tell of a leaf whose gradient autograd.grad returns
        return True
