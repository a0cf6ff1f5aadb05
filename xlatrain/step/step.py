"""Compiled steps: programs made from a gradient function, an optimizer update and a mesh."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from xlatrain.mesh.sharding import like_parameters, replicated
from xlatrain.step.assumed import Guarded, Outcomes, keep
from xlatrain.step.finite import FiniteGuard
from xlatrain.step.loss_scale import LossScaler, LossScaleState
from xlatrain.step.stacking import Stacking, rows
from xlatrain.step.state import TrainState, step_key
from xlatrain.xla.compiler_options import compiler_options
from xlatrain.xla.passes.apply import apply_jaxpr_passes

Arrays = Mapping[str, jax.Array]
Gradients = Mapping[str, jax.Array | None]


class GradientOutput(NamedTuple):
    """The results of a gradient function.

    Attributes:
        grads: parameter path → gradient, None where the loss does not depend on the parameter.
        buffers: the buffers that changed, by path.
        outputs: anything else that the host wants (loss, logged values, predictions).
        params: the parameters that the step itself wrote to (an average of weights), by path; the update starts from them.
        in_range: bool scalar, whether the step's indices are; None where none could be out of range. A guard that skips takes
            a step with others for one whose gradients are not finite.
        outcomes: those for which the step was made; None where it was made for none.
    """

    grads: dict[str, jax.Array | None]
    buffers: dict[str, jax.Array]
    outputs: Any
    params: Mapping[str, jax.Array] = MappingProxyType({})
    in_range: jax.Array | None = None
    outcomes: Outcomes | None = None


class GradientFunction(Protocol):
    """A pure function ``(params, buffers, batch, key, scalars) -> GradientOutput``, however it takes the gradients."""

    def __call__(self, params: Any, buffers: Any, batch: Any, key: jax.Array, scalars: Any, /) -> GradientOutput: ...


class UpdatedOutput(NamedTuple):
    """The results of a step that updates its parameters itself.

    Attributes:
        params, buffers: those that changed, by path.
        grads: the gradients that are left, by path.
        opt_state: all of it.
        outputs: anything else that the host wants.
        loss_scale: the state of loss scaling after the step; ``()`` without.
        outcomes: see :class:`GradientOutput`.
    """

    params: Mapping[str, jax.Array]
    buffers: dict[str, jax.Array]
    grads: dict[str, jax.Array]
    opt_state: Any
    outputs: Any
    loss_scale: LossScaleState | tuple[()] = ()
    outcomes: Outcomes | None = None


class UpdatingFunction(Protocol):
    """A pure function ``(state, batch, key, scalars, hypers) -> UpdatedOutput``: gradients and any number of optimizer steps.

    With loss scaling ``scalars`` ends with the scale and the growth tracker.
    """

    def __call__(self, state: TrainState, batch: Any, key: jax.Array, scalars: Any, hypers: Any, /) -> UpdatedOutput: ...


class UpdateFunction(Protocol):
    """A pure function ``(grads, opt_state, params, hyper) -> (params, opt_state, outputs)``: clipping and the optimizer."""

    def __call__(self, grads: Any, opt_state: Any, params: Any, hyper: Any, /) -> tuple[Any, Any, Any]: ...


def no_update(grads: Any, opt_state: Any, params: Any, hyper: Any) -> tuple[Any, Any, Any]:
    """The update of a step that updates its parameters itself."""
    return params, opt_state, ()


@dataclass(frozen=True)
class StepBuilder:
    """Builds the programs of one training step.

    All programs take and return the state, which is donated; the state's shardings are kept. ``batch``, ``scalars`` and
    ``hyper`` are any pytrees; new shapes compile a new program. Of a step that was made for certain outcomes, what is returned
    beside the state is the :class:`~xlatrain.step.assumed.Guarded` form of what is said here.

    Attributes:
        mesh: where the programs run.
        update: clipping and optimizer.
        state_shardings: a :class:`TrainState` of shardings, or None on one device.
        scaler: dynamic loss scaling. The gradient function then gets its state after its other scalars, and gives
            gradients of the scaled loss; a step whose gradients overflowed changes nothing but the scale.
        draws: whether the gradient function draws from its key; if not, the position in the random stream stays.
        gradient_bytes: of all parameters' gradients, unsharded; where they are many, the compiler is asked to save memory.
        guard: looks whether the gradients are finite. The update outputs are then ``(update_outputs, bool[n])``.
        stacking: the state that the programs take and return is stacked so (:mod:`xlatrain.step.stacking`); the update function
            gets stacked mappings, the gradient function a :class:`~xlatrain.step.stacking.Row` for each member of a stack.
    """

    mesh: Mesh
    update: UpdateFunction
    state_shardings: TrainState | None
    scaler: LossScaler | None = None
    draws: bool = True
    stacking: Stacking | None = None
    guard: FiniteGuard | None = None
    gradient_bytes: int = 0

    @property
    def key(self) -> Hashable:
        """All but :attr:`update` that a program is made from, of a builder without :attr:`guard`."""
        shardings = None
        if self.state_shardings is not None:
            leaves, structure = jax.tree.flatten(self.state_shardings)
            shardings = (tuple(leaves), structure)
        return (self.mesh, shardings, self.scaler, self.draws, self.stacking, self.gradient_bytes)

    def fused(self, gradients: GradientFunction) -> Callable[..., tuple[TrainState, Any]]:
        """``(state, batch, scalars, hyper) -> (state, (outputs, update_outputs))``: gradients and update."""

        def step(state: TrainState, batch: Any, scalars: Any, hyper: Any) -> tuple[TrainState, Any]:
            found, new = self._gradients(gradients, state, batch, scalars)
            new, grads = _take_accumulated(new, found.grads)
            new, extra = self._apply(new, grads, hyper)
            return self._guarded(found.outcomes, state, new, (found.outputs, extra))

        return self._compile(step)

    def accumulate(self, gradients: GradientFunction) -> Callable[..., tuple[TrainState, Any]]:
        """``(state, batch, scalars) -> (state, outputs)``: gradients are added to ``state.accumulated``; no update.

        A parameter enters ``accumulated`` with its first gradient, so that one that never receives any is still skipped.
        """

        def step(state: TrainState, batch: Any, scalars: Any) -> tuple[TrainState, Any]:
            found, new = self._gradients(gradients, state, batch, scalars)
            new = replace(new, accumulated=add_gradients(state.accumulated, found.grads))
            return self._guarded(found.outcomes, state, new, found.outputs)

        return self._compile(step)

    def split(self, gradients: GradientFunction) -> Callable[..., tuple[TrainState, Any]]:
        """``(state, batch, scalars) -> (state, (grads, outputs))``: the gradients leave the program, for hooks to see.

        They are those of this batch alone, without what was accumulated before. :meth:`apply` takes the sum.
        """

        def step(state: TrainState, batch: Any, scalars: Any) -> tuple[TrainState, Any]:
            found, new = self._gradients(gradients, state, batch, scalars)
            return self._guarded(found.outcomes, state, new, (found.grads, found.outputs))

        return self._compile(step)

    def updating(self, function: UpdatingFunction) -> Callable[..., tuple[TrainState, Any]]:
        """``(state, batch, scalars, hypers) -> (state, outputs)``: the function updates the parameters itself.

        It finds the gradients that the step before left in ``state.accumulated``, and leaves its own there.
        """

        def step(state: TrainState, batch: Any, scalars: Any, hypers: Any) -> tuple[TrainState, Any]:
            found = function(state, batch, step_key(state), (*scalars, *state.loss_scale), hypers)
            new = replace(
                state,
                params={**state.params, **found.params},
                buffers={**state.buffers, **found.buffers},
                opt_state=found.opt_state,
                accumulated=found.grads,
                draws=state.draws + 1 if self.draws else state.draws,
                loss_scale=found.loss_scale,
            )
            return self._guarded(found.outcomes, state, new, found.outputs)

        return self._compile(step)

    def apply(self) -> Callable[..., tuple[TrainState, Any]]:
        """``(state, grads, hyper) -> (state, update_outputs)``: the update alone."""

        def step(state: TrainState, grads: Gradients, hyper: Any) -> tuple[TrainState, Any]:
            return self._apply(state, grads, hyper)

        return self._compile(step)

    def _gradients(
        self, gradients: GradientFunction, state: TrainState, batch: Any, scalars: Any
    ) -> tuple[GradientOutput, TrainState]:
        """Gradients and outputs of one batch, and the state after it: new buffers, the next position in the random stream.

        With :attr:`stacking` the gradients are stacked as the parameters are. With a guard that skips, buffers stay as they were
        where a gradient is not finite.
        """
        scalars = (*scalars, *state.loss_scale)
        if self.stacking is None:
            found = gradients(state.params, state.buffers, batch, step_key(state), scalars)
        else:
            found = gradients(rows(state.params), state.buffers, batch, step_key(state), scalars)
            found = found._replace(grads=self.stacking.stack(found.grads))
        draws = state.draws + 1 if self.draws else state.draws
        if self.guard is not None and self.guard.skip:
            if found.in_range is not None:
                found = found._replace(grads=self.guard.spoil(~found.in_range, found.grads))
            finite = self.guard.check(found.grads).all()
            found = found._replace(buffers=self.guard.keep(finite, state.buffers, found.buffers))
        params = {**state.params, **found.params} if found.params else state.params
        return found, replace(state, params=params, buffers={**state.buffers, **found.buffers}, draws=draws)

    def _apply(self, state: TrainState, grads: Gradients, hyper: Any) -> tuple[TrainState, Any]:
        """The state after the update with ``grads``, and the update's outputs.

        ``grads``: path → array of the parameter's shape and dtype; None where there is no gradient.
        """
        with jax.named_scope("optimizer"):  # preflight and profiles tell its time by this name
            return self._updated(state, grads, hyper)

    def _updated(self, state: TrainState, grads: Gradients, hyper: Any) -> tuple[TrainState, Any]:
        if self.guard is not None:
            return self._apply_guarded(self.guard, state, grads, hyper)
        if self.scaler is None:
            params, opt_state, extra = self.update(grads, state.opt_state, state.params, hyper)
            return replace(state, params=params, opt_state=opt_state), extra
        grads, overflowed = self.scaler.unscale(grads, state.loss_scale)  # pyright: ignore[reportArgumentType]
        params, opt_state, extra = self.update(grads, state.opt_state, state.params, hyper)
        before = (state.params, state.opt_state)
        params, opt_state = self.scaler.keep_if(overflowed, before, (params, opt_state))
        loss_scale = self.scaler.update(state.loss_scale, overflowed)  # pyright: ignore[reportArgumentType]
        return replace(state, params=params, opt_state=opt_state, loss_scale=loss_scale), extra

    def _apply_guarded(self, guard: FiniteGuard, state: TrainState, grads: Gradients, hyper: Any) -> tuple[TrainState, Any]:
        """The state after a guarded update, and ``(update_outputs, bool[n])``: whether each gradient was finite."""
        flags = guard.check(grads)
        if self.state_shardings is not None:
            flags = jax.lax.with_sharding_constraint(flags, replicated(self.mesh))  # every process reads all of it
        finite = flags.all()
        if guard.skip:
            grads = guard.gradients_for_update(finite, grads, state.opt_state)
        params, opt_state, extra = self.update(grads, state.opt_state, state.params, hyper)
        if guard.skip:
            params, opt_state = guard.keep(finite, state.params, params), guard.keep(finite, state.opt_state, opt_state)
        return replace(state, params=params, opt_state=opt_state), (extra, flags)

    def _guarded(self, found: Outcomes | None, state: TrainState, new: TrainState, outputs: Any) -> tuple[TrainState, Any]:
        """The state after a step and its outputs; where it was made for other outcomes, ``state`` as it was."""
        if found is None:
            return new, outputs
        kept, left = keep(found.held, state, new)
        outcomes, shardings = found.found, self._shardings()
        if shardings is not None:
            places = jax.tree_util.tree_flatten_with_path(shardings_of(state, shardings))[0]
            where = {jax.tree_util.keystr(path): sharding for path, sharding in places}
            left = {name: jax.lax.with_sharding_constraint(leaf, where[name]) for name, leaf in left.items()}
            outcomes = jax.lax.with_sharding_constraint(outcomes, replicated(self.mesh))  # every process reads them
        return kept, Guarded(outputs, outcomes, left)

    def _shardings(self) -> TrainState | None:
        shardings = self.state_shardings
        if shardings is not None and self.stacking is not None:
            return self.stacking.stack_shardings(shardings)
        return shardings

    def _compile(self, step: Callable[..., tuple[TrainState, Any]]) -> Callable[..., tuple[TrainState, Any]]:
        """Jit ``step`` with its state donated and the state's shardings kept from step to step."""
        shardings = self._shardings()

        def placed(state: TrainState, *args: Any) -> tuple[TrainState, Any]:
            new, out = step(state, *args)
            return (new if shardings is None else constrain(new, shardings)), out

        if shardings is not None:
            placed = apply_jaxpr_passes(placed, lambda state: shardings_of(state, shardings))
        return jax.jit(placed, donate_argnums=0, compiler_options=compiler_options(self.mesh, self.gradient_bytes))


def add_gradients(accumulated: Arrays, grads: Gradients) -> dict[str, jax.Array]:
    """The sum of accumulated and new gradients; a path is in it if either side has a gradient."""
    total = dict(accumulated)
    for path, grad in grads.items():
        if grad is not None:
            total[path] = total[path] + grad if path in total else grad
    return total


def _take_accumulated(state: TrainState, grads: Gradients) -> tuple[TrainState, Gradients]:
    """The window's whole gradients, and a state whose window is empty."""
    if not state.accumulated:
        return state, grads
    total: dict[str, jax.Array | None] = {**dict.fromkeys(grads), **add_gradients(state.accumulated, grads)}
    return replace(state, accumulated={}), total


def constrain(state: TrainState, shardings: TrainState) -> TrainState:
    """``state`` with its leaves pinned to their shardings."""
    return jax.lax.with_sharding_constraint(state, shardings_of(state, shardings))


def shardings_of(state: TrainState, shardings: TrainState) -> TrainState:
    """``shardings`` for just what ``state`` holds; accumulated gradients are split like their parameters."""
    accumulated = {path: shardings.params[path] for path in state.accumulated}
    if jax.tree.structure(state.opt_state) != jax.tree.structure(shardings.opt_state):
        # An optimizer makes some state only with a parameter's first gradient, or a param group was added.
        mesh = shardings.draws.mesh  # pyright: ignore[reportAttributeAccessIssue]  shardings in place of arrays
        opt_state = like_parameters(state.opt_state, state.params, shardings.params, mesh)  # pyright: ignore[reportArgumentType]
        shardings = replace(shardings, opt_state=opt_state)
    return replace(shardings, accumulated=accumulated)


def state_shardings(
    state: TrainState, params: Mapping[str, jax.sharding.NamedSharding], opt_state: Any, mesh: Mesh
) -> TrainState:
    """Shardings for a state: parameters and optimizer state as given, everything else replicated."""
    whole = replicated(mesh)
    return TrainState(
        params=dict(params),  # pyright: ignore[reportArgumentType]  shardings in place of arrays
        buffers=dict.fromkeys(state.buffers, whole),  # pyright: ignore[reportArgumentType]
        opt_state=opt_state,
        accumulated={},
        draws=whole,  # pyright: ignore[reportArgumentType]
        key=whole,  # pyright: ignore[reportArgumentType]
        loss_scale=jax.tree.map(lambda _: whole, state.loss_scale),
    )


def pack_scalars(values: list[jax.Array]) -> jax.Array:
    """Pack scalars of any dtype into one vector, so that the host makes one read instead of many.

    Returns:
        float32[len(values)]; float64 if one of the scalars is float64.
    """
    dtype = jnp.float64 if any(value.dtype == jnp.float64 for value in values) else jnp.float32
    return jnp.stack([value.astype(dtype).reshape(()) for value in values]) if values else jnp.zeros((0,), dtype)
