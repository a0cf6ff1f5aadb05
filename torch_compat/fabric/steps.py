"""Programs of a raw loop: whole steps, and single calls of modules whose backward pass the host asks for later."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
import torch.utils._pytree as pytree
from jax.sharding import Mesh
from torch.utils.weak import WeakIdKeyDictionary

from torch_compat.run.batches import BatchSpec
from torch_compat.step.capture.cached_program import Built, CachedProgram, NamedStatic, StepName
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.capture.module_call import call_backward_body, call_body
from torch_compat.step.capture.step_capture import StepInputs, UserCall
from torch_compat.step.eager.fallback import executor_choice
from torch_compat.step.effects.effects import root_name
from torch_compat.step.host.host_values import HostNumbers, HostValues
from torch_compat.step.host.slots import indices_of_values
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.model_state import ModelState
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.outcome import Filler
from torch_compat.step.placed_batch import PlacedBatch
from torch_compat.step.program_cache import Wanted
from torch_compat.step.programs import evaluation_program, in_matmul_precision
from torch_compat.step.step_services import StepServices
from torch_compat.utilities.host_arrays import to_torch
from xlatrain.bridge.errors import CaptureError
from xlatrain.mesh.sharding import like_parameters
from xlatrain.step.step import add_gradients
from xlatrain.xla.compiler_options import compiler_options
from xlatrain.xla.passes.apply import apply_jaxpr_passes


@dataclass(frozen=True)
class Call:
    """A call of a set-up module that is to be run.

    Attributes:
        module, method: what is called.
        batch: the arguments, this process's rows.
        numbers: those among the arguments.
        user: ``(batch, tracer) -> result``.
        wanted: the batch's tensors, by position, that require gradients.
    """

    module: torch.nn.Module
    method: str
    batch: Any
    numbers: Mapping[str, Any]
    user: UserCall
    wanted: tuple[int, ...] = ()


_Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class ModuleCall:
    """An executed call of a module.

    Attributes:
        result: what it returned, with tensors on the host: this process's rows.
        differentiable: positions, among the result's tensors, of those that depend on a parameter or a differentiated argument.
        backward: ``(cotangents of these, parameters)`` → gradients of the parameters and of the arguments. With None for
            the parameters those of all are added to what ``p.grad`` shows.
        check_again: refuses to have the call computed once more, in torch, for a graph of its gradients.
    """

    result: Any
    differentiable: tuple[int, ...] = ()
    backward: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor] | None], tuple[_Gradients, _Gradients]] | None = None
    check_again: Callable[[], None] | None = None


@dataclass(frozen=True)
class _CallNames:
    """The names of the steps that calls of one method of one module are: the call, and its backward pass."""

    forward: StepName
    backward: StepName

    @classmethod
    def of(cls, module: torch.nn.Module, method: str) -> _CallNames:
        text = f"{type(module).__name__}.{method}"
        return cls(StepName(text, method), StepName(f"the backward pass of {text}", method))


@dataclass(frozen=True)
class _PlacedCall:
    """A call that may be differentiated, with its batch on the mesh."""

    call: Call
    names: _CallNames
    batch: PlacedBatch
    host: HostValues

    @property
    def facts(self) -> NamedStatic:
        return NamedStatic((("arguments that require grad", self.call.wanted),))

    def has_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has the rows of the batch."""
        return bool(shape) and any(self.batch.form.split) and shape[0] == self.batch.size


class FabricSteps(MeshStepRunner):
    """Adds calls of modules and single updates to the steps of one model.

    Args:
        shortage: around programs: makes of what XLA raises where device memory is short an error that explains it.
        For the others see :class:`~torch_compat.step.mesh_step_runner.MeshStepRunner`.
    """

    def __init__(
        self, model: ModelState, mesh: Mesh, services: StepServices, shortage: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__(model, mesh, services)
        self._shortage = shortage
        self._gone: deque[StepName] = deque()
        self._followers: dict[str, set[StepName]] = {}  # root → the steps that find it in their variables
        self._calls: MutableMapping[torch.nn.Module, dict[str, _CallNames]] = WeakIdKeyDictionary()
        self._updates: dict[Hashable, Callable[..., Any]] = {}

    # -- functions of the user's ---------------------------------------------------------------------------------------

    def follow_code(self, name: StepName, function: Callable[..., Any]) -> None:
        """Guard what the code of ``function`` reads, for the step ``name``."""
        self._variants.add_function(name, function)

    def follow(self, name: StepName, variable: str, container: Any) -> None:
        """Follow side effects on ``container``, a list, dict, set or object that the step ``name`` finds in ``variable``."""
        root = root_name(self._effects.roots, f"{name}.{variable}", container)
        self._effects.roots[root] = container
        self._followers.setdefault(root, set()).add(name)

    def forget(self, name: StepName) -> None:
        """Let go of a step whose function is no more, when the next one begins: this may be called at any moment."""
        self._gone.append(name)

    def place(self, batch: Any) -> PlacedBatch:
        """Put this process's rows of a batch on the mesh, see :meth:`MeshStepRunner.place`; a step begins."""
        while self._gone:
            name = self._gone.pop()
            self._variants.forget(name)
            for root in [root for root, steps in self._followers.items() if name in steps]:
                self._followers[root].remove(name)
                if not self._followers[root] and not self._variants.changes(root):
                    del self._followers[root], self._effects.roots[root]
        return super().place(batch)

    # -- calls -----------------------------------------------------------------------------------------------------

    def _names_of(self, module: torch.nn.Module, method: str) -> _CallNames:
        found = self._calls.setdefault(module, {})
        if method not in found:
            found[method] = _CallNames.of(module, method)
        return found[method]

    def call(self, call: Call) -> ModuleCall:
        """Run one call of a module as a program, without gradients."""
        name, host = self._names_of(call.module, call.method).forward, HostValues(HostNumbers(call.numbers))
        with self._shortage():
            return ModuleCall(_on_host(self.evaluate(name, self.place(call.batch), NamedStatic(), host, call.user).result))

    def differentiable_call(self, call: Call) -> ModuleCall:
        """Call a module whose backward pass may be asked for: that is another program, which computes the call again."""
        self.copy_batches = True  # the backward pass reads the batch once more
        placed, host = self.place(call.batch), HostValues(HostNumbers(call.numbers), drawn={})
        if placed.values is not None:
            placed.values.takes_state = False  # the forward pass may change buffers for which both ask
        one = _PlacedCall(call, self._names_of(call.module, call.method), placed, host)
        undoable = True
        try:
            forward = self._forward_variant(one)
            backward = self._backward_variant(one, forward.step)
            state = self.model.state
            inputs = (state.params, state.buffers, state.key, np.int32(-self.count_evaluation()), placed.arrays)
            undoable = forward.may_be_taken_back
            scalars = forward.scalars(host)
            self._check_backward(one, forward.step, backward, inputs, host)
            written, outputs = self._explained(forward, *inputs, scalars)
        except BaseException as error:
            self.take_back(error, host, wholly=undoable)
            raise
        if any(written):
            self.take_written(*written)
        indices = forward.step.differentiable

        def differentiate(
            cotangents: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor] | None
        ) -> tuple[_Gradients, _Gradients]:
            given = self._place_cotangents(cotangents, _with_rows(one, forward.step), placed)
            grads, outputs = self._run_backward(backward, inputs, given, host)
            fill = Filler(backward.step, outputs, placed, self._forms.layout, host)
            of_arguments = [None if found is None else _on_host(found) for found in fill(backward.step.result.tree)]
            if wanted is None:
                self._add_gradients(grads)
                return [], of_arguments
            found = [grads.get(self.model.name_of(param) or "") for param in wanted]
            return [None if one is None else to_torch(one) for one in found], of_arguments

        def check_again() -> None:
            now, used = self.model.state.params, backward.step.used_params
            if any(now[name] is not state.params[name] for name in used):
                raise RuntimeError(_MODIFIED)
            refuse_again(one.names.forward, forward.step, writes=any(written), processes=self._forms.layout.processes)
            reason = "a graph of its gradients is made (create_graph=True), by computing the call again in torch"
            self.log.on_host.setdefault(one.names.backward, reason)

        outcome = self._outcome(one.names.forward, forward, placed, outputs, host)
        results = indices_of_values(forward.step.result.tree)
        differentiable = tuple(i for i, one in enumerate(results) if one in indices)
        return ModuleCall(_on_host(outcome.result), differentiable, differentiate, check_again)

    def _forward_variant(self, one: _PlacedCall) -> CachedProgram:
        name = one.names.forward

        def build(step: CapturedStep, placed: PlacedBatch) -> Built:
            _check_call(step, name)
            shardings = self.model.param_shardings
            make = functools.partial(evaluation_program, step, placed, self.mesh, shardings, stacked=False)
            return self.programs.call(step, placed, "forward", make)

        spec = self.spec(call_body(one.call.wanted), one.batch, one.call.user)
        return self._variants.program(Wanted(name, one.facts, one.batch, one.host, spec, build))

    def _backward_variant(self, one: _PlacedCall, forward: CapturedStep) -> CachedProgram:
        def inputs(host_values: HostValues) -> StepInputs:
            specs = [forward.value_specs[index] for index in forward.differentiable]
            cotangents = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs]
            given = self._inputs(one.batch, one.call.user, host_values)
            both: Any = _WithCotangents(given.spec, len(given.leaves))
            return dataclasses.replace(given, leaves=[*given.leaves, *cotangents], spec=both, carried=())

        def build(step: CapturedStep, placed: PlacedBatch) -> Built:
            split = (*placed.form.split, *_with_rows(one, forward))
            return self.programs.call(step, placed, ("backward", split), lambda: self._backward_program(step, placed, split))

        spec = self.spec(call_backward_body(one.call.wanted), one.batch, one.call.user)
        spec = dataclasses.replace(spec, inputs=inputs)
        return self._variants.program(Wanted(one.names.backward, one.facts, one.batch, one.host, spec, build))

    def _backward_program(self, step: CapturedStep, batch: PlacedBatch, split: Sequence[bool]) -> Callable[..., Any]:
        """``(params, buffers, raw key, draws, arrays, scalars) -> (grads, outputs)``, jitted.

        Args:
            split: whether each of the arrays, which are the batch and then cotangents, is split over the mesh.
        """
        gradients, rows = in_matmul_precision(step.gradient_function(mesh=self.mesh)), batch.form.rows
        shardings = self.model.param_shardings if self.mesh.devices.size > 1 else None

        def backward(params: Any, buffers: Any, raw_key: jax.Array, draws: jax.Array, arrays: Any, scalars: Any) -> Any:
            key = jax.random.fold_in(jax.random.wrap_key_data(raw_key), draws)
            real = [rows.cut(x) if cut and rows.is_padded else x for x, cut in zip(arrays, split, strict=True)]
            found = gradients(params, buffers, real, key, scalars)
            grads = {name: grad for name, grad in found.grads.items() if grad is not None}
            if shardings is not None:
                grads = jax.lax.with_sharding_constraint(grads, {name: shardings[name] for name in grads})
            return grads, found.outputs

        program = backward if shardings is None else apply_jaxpr_passes(backward, lambda params: shardings)
        return jax.jit(program, compiler_options=compiler_options(self.mesh, self.model.gradient_bytes()))

    def _place_cotangents(self, cotangents: Sequence[torch.Tensor], rows: Sequence[bool], placed: PlacedBatch) -> list[Any]:
        """Cotangents as the program takes them. The loss is taken as a mean over the process's rows, as DDP takes it."""
        own = len(self._forms.layout.own_rows(placed.form.rows)) if self._forms.layout.processes > 1 else placed.size
        weight = own / max(placed.size, 1)
        with_rows = [one if weight == 1.0 else one * weight for one, split in zip(cotangents, rows, strict=True) if split]
        placed_rows = iter(self.place(with_rows).arrays if with_rows else ())
        return [
            next(placed_rows) if split else self.model.replicate(cotangent.detach().numpy())
            for cotangent, split in zip(cotangents, rows, strict=True)
        ]

    def _check_backward(
        self, one: _PlacedCall, forward: CapturedStep, backward: CachedProgram, inputs: tuple[Any, ...], host: HostValues
    ) -> None:
        """Raise what lowering the backward program raises while the call may still run otherwise: nothing else has run."""
        if backward.runs or backward.compiled or backward.is_checked:
            return
        rows, placed = _with_rows(one, forward), one.batch
        own = len(self._forms.layout.own_rows(placed.form.rows)) if self._forms.layout.processes > 1 else placed.size
        specs = [forward.value_specs[index] for index in forward.differentiable]
        shapes = [(own, *spec.shape[1:]) if split else spec.shape for spec, split in zip(specs, rows, strict=True)]
        zeros = [torch.zeros(shape, dtype=spec.dtype) for shape, spec in zip(shapes, specs, strict=True)]
        *before, arrays = inputs
        known, state = dataclasses.replace(host, drawn=dict(host.drawn or {})), torch.get_rng_state()
        try:
            scalars = backward.scalars(known)
        finally:
            torch.set_rng_state(state)
        self._variants.check(backward, *before, [*arrays, *self._place_cotangents(zeros, rows, placed)], scalars)

    def _run_backward(
        self, variant: CachedProgram, inputs: tuple[Any, ...], cotangents: list[Any], host_values: HostValues
    ) -> Any:
        params, *state, arrays = inputs
        used = variant.step.used_params
        now = self.model.state.params  # none, where the module has left the mesh since the call
        params = {name: params[name] if name in used else _unused(params[name], now.get(name)) for name in params}
        if any(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)) if isinstance(leaf, jax.Array)):
            raise RuntimeError(_MODIFIED)
        scalars = variant.scalars(host_values)
        return self._explained(variant, params, *state, [*arrays, *cotangents], scalars)

    def _add_gradients(self, grads: dict[str, Any]) -> None:
        model = self.model
        if model.is_released:
            for name, grad in grads.items():
                param, found = model.params[name], to_torch(grad)
                param.grad = found if param.grad is None else param.grad + found
            return
        model.gradients.push()
        total = _sum(model.state.accumulated, grads)
        model.state = dataclasses.replace(model.state, accumulated=total)

    # -- updates ---------------------------------------------------------------------------------------------------

    def update(self, index: int, optimizers: OptimizerSet) -> None:
        """Step the ``index``-th optimizer with the gradients that ``p.grad`` shows; they stay."""
        model = self.model
        model.push_writes()
        optimizer = optimizers.optimizers[index]
        params = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
        own = {model.name_of(param) for param in params}
        stepped = tuple(name for name in model.state.accumulated if name in own)
        key = (index, stepped, optimizers.static_key())
        first = key not in self._updates
        if first:
            self._updates[key] = self._update_program(index, optimizers)
        state, hyper = model.state, model.replicate(optimizer.hyper())
        params = {name: state.params[name] for name in stepped}
        grads = {name: state.accumulated[name] for name in stepped}
        with self._shortage():
            new, opt_state = self._updates[key](params, state.opt_state, grads, hyper)
            if first:
                jax.block_until_ready(new)
        optimizer.mark_stepped()
        model.advance(dataclasses.replace(state, params={**state.params, **new}, opt_state=opt_state))
        optimizer.run_post_hooks()

    def _explained(self, program: CachedProgram, *args: Any) -> Any:
        """Run a program; this waits for its first run, when a lack of memory may show."""
        with self._shortage():
            found = self._variants.run(program, *args)
            return jax.block_until_ready(found) if program.runs == 1 else found

    def _update_program(self, index: int, optimizers: OptimizerSet) -> Callable[..., Any]:
        """``(params, opt_state, grads, hyper) -> (params, opt_state)``, jitted.

        Only what it replaces is donated: calls of modules that are not updated may still be differentiated.
        """
        model, mesh = self.model, self.mesh
        run = optimizers.update_from_host if model.offloads else optimizers.update

        def update(params: Any, opt_state: Any, grads: Any, hyper: Any) -> Any:
            new, opt_state = run(index, grads, opt_state, params, hyper)
            if model.shardings is None:
                return new, opt_state
            shardings = like_parameters(opt_state, model.state.params, model.state_places, mesh)
            new = jax.lax.with_sharding_constraint(new, {name: model.param_shardings[name] for name in new})
            return new, jax.lax.with_sharding_constraint(opt_state, shardings)

        options = compiler_options(mesh, model.gradient_bytes())
        return jax.jit(in_matmul_precision(update), donate_argnums=(0, 1), compiler_options=options)


class _WithCotangents:
    """The spec of a batch that cotangents follow."""

    def __init__(self, spec: BatchSpec, count: int) -> None:
        self._spec = spec
        self._count = count
        self.others = spec.others

    def unflatten(self, leaves: Sequence[Any], other: Callable[[Any, int], Any] | None = None) -> Any:
        return self._spec.unflatten(leaves[: self._count], other), list(leaves[self._count :])

    def put_back(self) -> None:
        self._spec.put_back()


def _check_call(step: CapturedStep, name: str) -> None:
    """Refuse a call that a backward pass which computes it again cannot serve."""
    whole = "or compile the whole step: fabric.compile(step)"
    if step.stores_graph:
        raise CaptureError(
            f"{name} keeps a tensor that it computed in an attribute, list or dict, where it could be differentiated. Return it, "
            f"detach() it before it is kept, {whole}"
        )
    if step.scalars.draws:
        raise CaptureError(
            f"{name} draws from Python's or numpy's random generators, and its backward pass would draw again: draw outside of "
            f"it, {whole}"
        )


def refuse_again(name: str, step: CapturedStep, *, writes: bool, processes: int) -> None:
    """Refuse to have torch compute a call again, for a graph of its gradients.

    Args:
        name: of the call.
        writes: whether it changed parameters or buffers.
        processes: over which its rows are split.

    Raises:
        RuntimeError: it would do something else, or something twice; or other processes have rows that it needs; or only
            compiled steps are wanted.
    """
    why = None
    if executor_choice() == "compiled":
        why = "XLATRAIN_EXECUTOR=compiled allows no call in plain torch"
    elif processes > 1:
        why = "this process has a part of the rows"
    elif step.capture.uses_random:
        why = "it draws random numbers"
    elif writes or step.effects.records:
        why = "it changes buffers, attributes or lists"
    if why is not None:
        raise RuntimeError(
            f"{name} can be differentiated once: for create_graph=True (a gradient penalty) torch computes a call again, and "
            f"{why}. Compile the whole step, fabric.compile(step), or run eagerly (XLATRAIN_EXECUTOR=eager)"
        )


_MODIFIED = (
    "one of the variables needed for gradient computation has been modified: the parameters were updated (by an optimizer's "
    "step, or a compiled step) between this call of the module and its backward pass"
)


def _with_rows(one: _PlacedCall, forward: CapturedStep) -> list[bool]:
    """Whether each differentiable tensor of a call's result has the rows of its batch."""
    return [one.has_rows(forward.value_specs[index].shape) for index in forward.differentiable]


@jax.jit  # without compiler_options: sums alone
def _sum(carried: dict[str, jax.Array], fresh: dict[str, jax.Array | None]) -> dict[str, jax.Array]:
    return add_gradients(carried, fresh)


def _on_host(tree: Any) -> Any:
    """``tree`` with ordinary tensors in place of those that are read later."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def _unused(before: jax.Array, now: jax.Array | None) -> jax.Array:
    """A parameter that a program takes and does not use, whose array may have been donated since."""
    if now is not None:
        return now
    return jax.device_put(np.zeros(before.shape, before.dtype), before.sharding) if before.is_deleted() else before
