"""The engine for a ``flax.nnx`` module with an ``optax`` optimizer: the caller owns the loop, and nothing here imports torch.

::

    engine = Engine(Model, optax.adamw(1e-3), mesh=make_mesh({"data": 2, "fsdp": 4}))
    state = engine.init(seed=0)
    step = engine.compile_train_step(loss_fn)
    for batch in engine.place(batches):
        state, output = step(state, batch)
    engine.save("last.ckpt", state).wait()
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlatrain import checkpoint
from xlatrain.mesh.batch_layout import BatchPadding
from xlatrain.mesh.data import BatchPlacer, GlobalBatch, RowCut
from xlatrain.mesh.mesh import batch_axes, data_parallel_size
from xlatrain.mesh.sharding import ShardingRules, replicated
from xlatrain.mesh.sharding.rules import literal
from xlatrain.step.clipping import clip_by_norm, total_norm
from xlatrain.step.device_memory import explained_shortage
from xlatrain.step.state import TrainState
from xlatrain.step.step import GradientOutput, StepBuilder, shardings_of, state_shardings
from xlatrain.step.variables import annotation, by_name
from xlatrain.xla.compilation_cache import first_run
from xlatrain.xla.compiler_options import compiler_options
from xlatrain.xla.passes.apply import apply_jaxpr_passes
from xlatrain.xla.passes.batch_groups import without_batch_groups

LossFunction: TypeAlias = Callable[[Any, Any], Any]
"""``(model, batch) -> loss`` or ``(loss, aux)``: a scalar mean over the batch, and any pytree of arrays."""


class StepOutput(NamedTuple):
    """The results of a training step, still on the devices: reading a value waits for the step.

    Attributes:
        loss: scalar.
        grad_norm: float32 scalar, the global norm of the gradients before clipping.
        aux: what the loss function returned beside the loss; None if nothing.
    """

    loss: jax.Array
    grad_norm: jax.Array
    aux: Any


class Engine:
    """Trains one module on one mesh. It holds no arrays: those are in the :class:`~xlatrain.step.state.TrainState` that it makes.

    Parameters are named by their dotted path in the module (``blocks.0.attn.kernel``). A parameter's sharding is, in this order:
    that of the first rule whose glob matches; its own annotation (``nnx.with_partitioning``); ``rules``' automatic choice.

    Args:
        make_module: ``nnx.Rngs -> nnx.Module``, e.g. the class, or a lambda with its arguments. It is traced, never run eagerly.
        optimizer: any ``optax`` transformation.
        mesh: where everything lives, e.g. from :func:`xlatrain.mesh.mesh.make_mesh`.
        rules: how parameters are split.
        accumulate: each batch is computed in this many microbatches (rows ``i::accumulate``), one after the other inside the
            program; gradients, losses and floating ``aux`` leaves are averaged.
        clip_norm: scale gradients down to this global norm (:func:`xlatrain.step.clipping.clip_by_norm`) before the optimizer.
        trainable: which variables are parameters, as an nnx filter; all others are buffers, updated as the module updates them.

    Raises:
        ValueError: ``accumulate`` or ``clip_norm`` is not positive, or a sharding does not fit a parameter.
    """

    def __init__(
        self,
        make_module: Callable[[nnx.Rngs], Any],
        optimizer: optax.GradientTransformation,
        *,
        mesh: Mesh,
        rules: ShardingRules | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        trainable: nnx.filterlib.Filter = nnx.Param,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate!r}; expected the number of microbatches per batch, at least 1")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm!r}; expected a positive norm, or None for no clipping")
        self.mesh = mesh
        self._make_module = make_module
        self._optimizer = optimizer
        self._accumulate = accumulate
        self._clip_norm = clip_norm
        self._trainable = trainable
        with jax.set_mesh(mesh):
            model = nnx.eval_shape(lambda: make_module(nnx.Rngs(0)))
            self._graphdef, params, buffers = nnx.split(model, trainable, ...)
            self._params, self._buffers = by_name(params), by_name(buffers)
        if not self._params:
            raise ValueError(f"the module has no variables that match trainable={trainable!r}; there is nothing to train")
        self._shardings = self._choose_shardings(rules or ShardingRules())
        self.abstract_state: TrainState = self._abstract_state()

    def init(self, seed: int = 0) -> TrainState:
        """A new state, each parameter made directly on its shards. Values depend on the seed and the module, not on the mesh."""
        with jax.set_mesh(self.mesh):
            return self._compiled_init(jax.random.key(seed))

    @functools.cached_property
    def _compiled_init(self) -> Callable[[jax.Array], TrainState]:
        # without compiler_options: run once; initializers draw, and hardly compute
        return jax.jit(self._make_state, out_shardings=self._shardings)

    @functools.cached_property
    def _placer(self) -> BatchPlacer:
        return BatchPlacer(self.mesh)  # not before there are batches: a mesh of devices that are not here gets none

    def module(self, state: TrainState) -> Any:
        """The module with the arrays of ``state``, for inference. The next step deletes them: make it again after one."""
        return self._module(state.params, state.buffers)

    def write(self, module: Any, state: TrainState) -> None:
        """Give the variables of a module of :meth:`module` the arrays of ``state``, which the next step deletes."""
        nnx.update(module, *(_with_values(*pair) for pair in ((self._params, state.params), (self._buffers, state.buffers))))

    def read(self, module: Any, state: TrainState) -> TrainState:
        """``state`` with what was written into the module's variables since :meth:`write`, on the shards of this engine.

        Raises:
            ValueError: a variable has another shape or dtype than it had, or there are others than there were.
        """
        _, params, buffers = nnx.split(module, self._trainable, ...)
        return dataclasses.replace(
            state,
            params=_placed_like(_values(params), state.params, self._shardings.params),
            buffers=_placed_like(_values(buffers), state.buffers, self._shardings.buffers),
        )

    def buffers_of(self, module: Any) -> dict[str, Any]:
        """The arrays of a module's buffers, by name."""
        _, _, buffers = nnx.split(module, self._trainable, ...)
        return _values(buffers)

    def with_buffers(self, state: TrainState, changed: Mapping[str, Any]) -> TrainState:
        """``state`` with other values of some buffers, on the shards of this engine."""
        return dataclasses.replace(
            state, buffers=_placed_like({**state.buffers, **changed}, state.buffers, self._shardings.buffers)
        )

    def with_structure(self, graphdef: Any) -> Engine:
        """This engine for modules with other plain attributes: the graph definition of ``nnx.split(module, trainable, ...)``."""
        other = copy.copy(self)
        other._graphdef = graphdef
        return other

    def place(self, batches: Iterable[Any], prefetch_depth: int = 1) -> Iterator[GlobalBatch]:
        """Make global arrays of the batches (pytrees of numpy arrays, this process's rows), a little ahead of their use."""
        return self._placer.feed(batches, prefetch_depth)

    def compile_train_step(self, loss_fn: LossFunction) -> Callable[[TrainState, Any], tuple[TrainState, StepOutput]]:
        """Compile ``(state, batch) -> (state, StepOutput)``. The state is donated: use only the returned state.

        ``batch`` is an item of :meth:`place`, or this process's rows as numpy arrays. A batch that does not divide the mesh is
        padded, and cut back inside the program; new shapes compile a new program.

        Raises (from the step):
            TypeError: the loss is not a floating scalar.
            ValueError: the batch cannot be cut into ``accumulate`` microbatches.
            OutOfDeviceMemory: the first step of these shapes does not fit; says what takes the memory, and what to change.
        """
        builder = StepBuilder(self.mesh, self._update, self._shardings, gradient_bytes=self._gradient_bytes)
        programs: dict[RowCut, Callable[..., Any]] = {}

        def step(state: TrainState, batch: Any) -> tuple[TrainState, StepOutput]:
            placed = self._placed(batch)
            is_first = placed.cut not in programs
            if is_first:
                programs[placed.cut] = builder.fused(self._gradient_function(loss_fn, placed.cut))
            with jax.set_mesh(self.mesh), explained_shortage(lambda: state, lambda: _MEMORY_ADVICE):
                program = functools.partial(first_run, programs[placed.cut]) if is_first else programs[placed.cut]
                new, ((loss, aux), grad_norm) = program(state, placed.tree, (), ())
                if is_first:  # programs run asynchronously: what does not fit shows in the first run
                    jax.block_until_ready(loss)
            return new, StepOutput(loss, grad_norm, aux)

        return step

    def train_program(self, loss_fn: LossFunction, batch: Any) -> Callable[..., Any]:
        """The jitted program of :meth:`compile_train_step` for global batches like this pytree, whose rows divide the mesh.

        It is ``(state, batch, (), ()) -> (state, …)``, to be lowered under ``jax.set_mesh(engine.mesh)``: see
        :func:`xlatrain.preflight.preflight_engine`.
        """
        leaves = jax.tree.leaves(batch)
        split = tuple(bool(leaf.shape) for leaf in leaves)
        rows = next((leaf.shape[0] for leaf in leaves if leaf.shape), 1)
        builder = StepBuilder(self.mesh, self._update, self._shardings, gradient_bytes=self._gradient_bytes)
        return builder.fused(self._gradient_function(loss_fn, RowCut(BatchPadding.full(rows), split)))

    def compile_eval_step(self, function: Callable[[Any, Any], Any]) -> Callable[[TrainState, Any], Any]:
        """``(state, batch) -> function(module, batch)`` as one program. The state is kept; what the module changes is dropped."""

        def run(state: TrainState, batch: Any, cut: RowCut) -> Any:
            def evaluate(state: TrainState, batch: Any) -> Any:
                return function(self._module(state.params, state.buffers), cut(batch))

            contracted = without_batch_groups(evaluate, self.mesh)
            return apply_jaxpr_passes(contracted, lambda state: shardings_of(state, self._shardings))(state, batch)

        program = jax.jit(run, static_argnames="cut", compiler_options=compiler_options(self.mesh))

        def step(state: TrainState, batch: Any) -> Any:
            placed = self._placed(batch)
            with jax.set_mesh(self.mesh):
                return program(state, placed.tree, cut=placed.cut)

        return step

    def save(
        self,
        path: str | os.PathLike[str],
        state: TrainState,
        files: checkpoint.FilesArgument = None,
        *,
        wait: bool = False,
    ) -> checkpoint.PendingSave:
        """Save ``state`` (see :func:`xlatrain.checkpoint.save`); collective. The state may be donated as soon as this returns."""
        return checkpoint.save(path, state, files, wait=wait)

    def restore(self, path: str | os.PathLike[str]) -> TrainState:
        """The state saved at ``path``, from any mesh, directly onto this engine's shards.

        Raises:
            CheckpointMismatchError: lists every parameter or optimizer state that differs in name, shape or dtype.
        """
        return checkpoint.open_checkpoint(path).restore(self.abstract_state)

    def _make_state(self, key: jax.Array) -> TrainState:
        """Pure; also the source of every shape."""
        _, params, buffers = nnx.split(self._make_module(nnx.Rngs(key)), self._trainable, ...)
        values = _values(params)
        return TrainState(
            params=values,
            buffers=_values(buffers),
            opt_state=self._optimizer.init(values),
            accumulated={},
            draws=jnp.zeros((), jnp.int32),
            key=jax.random.key_data(key),
        )

    def _choose_shardings(self, rules: ShardingRules) -> TrainState:
        state = self._shapes()
        annotated = {name: spec for name, (_, variable) in self._params.items() if (spec := annotation(variable)) is not None}
        chosen = ShardingRules((*rules.by_path, *((literal(name), spec) for name, spec in annotated.items())), rules.min_size)
        params = chosen.shardings(state.params, self.mesh)
        opt_state = optax.tree_utils.tree_map_params(
            self._optimizer,
            lambda leaf, param, sharding: sharding if leaf.shape == param.shape else replicated(self.mesh),
            state.opt_state,
            state.params,
            params,
            transform_non_params=lambda _: replicated(self.mesh),
        )
        return state_shardings(state, params, opt_state, self.mesh)

    @property
    def _gradient_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.abstract_state.params.values())

    def _shapes(self) -> TrainState:
        with jax.set_mesh(self.mesh):
            return jax.eval_shape(self._make_state, jax.eval_shape(lambda: jax.random.key(0)))

    def _abstract_state(self) -> TrainState:
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self._shapes(),
            self._shardings,
        )

    def _module(self, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> Any:
        return nnx.merge(self._graphdef, _with_values(self._params, params), _with_values(self._buffers, buffers))

    def _placed(self, batch: Any) -> GlobalBatch:
        return batch if isinstance(batch, GlobalBatch) else self._placer(batch)

    def _gradient_function(self, loss_fn: LossFunction, cut: RowCut) -> Any:
        rows = cut.rows
        if rows.size % self._accumulate:
            raise ValueError(
                f"a batch of {rows.size} rows cannot be cut into accumulate={self._accumulate} equal microbatches; give batches "
                "whose size is a multiple, or drop the last one"
            )

        def gradients(params: Any, buffers: Any, batch: Any, key: jax.Array, scalars: Any) -> GradientOutput:
            batch = cut(batch)
            if self._accumulate == 1:
                return self._gradients_of(loss_fn, params, buffers, batch)
            return self._accumulated(loss_fn, params, buffers, _microbatches(batch, cut, self._accumulate, self.mesh))

        return gradients

    def _gradients_of(self, loss_fn: LossFunction, params: Any, buffers: Any, batch: Any) -> GradientOutput:
        def loss_of(params: Any, buffers: Any, batch: Any) -> tuple[jax.Array, tuple[Any, dict[str, Any]]]:
            model = self._module(params, buffers)
            loss, aux = _loss_and_aux(loss_fn(model, batch))
            _, _, changed = nnx.split(model, self._trainable, ...)
            return loss, (aux, _values(changed))

        differentiated = without_batch_groups(jax.value_and_grad(loss_of, has_aux=True), self.mesh)
        (loss, (aux, changed)), grads = differentiated(params, buffers, batch)
        return GradientOutput(grads, changed, (loss, aux))

    def _accumulated(self, loss_fn: LossFunction, params: Any, buffers: Any, batches: Any) -> GradientOutput:
        def body(carry: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], Any]:
            total, buffers = carry
            found = self._gradients_of(loss_fn, params, buffers, batch)
            return (jax.tree.map(jnp.add, total, found.grads), found.buffers), found.outputs

        zeros = jax.tree.map(jnp.zeros_like, params)
        (total, changed), (losses, aux) = jax.lax.scan(body, (zeros, buffers), batches)
        grads = jax.tree.map(lambda grad: grad / self._accumulate, total)
        return GradientOutput(grads, changed, (losses.mean(), _averaged(aux, self._accumulate)))

    def _update(self, grads: Any, opt_state: Any, params: Any, hyper: Any) -> tuple[Any, Any, Any]:
        if self._clip_norm is None:
            norm = total_norm(grads)
        else:
            grads, norm = clip_by_norm(grads, self._clip_norm)
        updates, opt_state = self._optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, norm


_MEMORY_ADVICE = (
    "an fsdp axis in make_mesh: parameters, gradients and optimizer state are split over its devices",
    "Engine(accumulate=…): microbatches one after the other",
    "nnx.remat around layers: activations are computed again instead of kept",
    "bfloat16 parameters or activations (dtype and param_dtype of the layers)",
    "xlatrain.preflight.preflight_engine says what a step needs on a pod, without one",
)


def _values(state: nnx.State) -> dict[str, Any]:
    return {name: variable.get_value() for name, (_, variable) in by_name(state).items()}


def _placed_like(now: Mapping[str, Any], before: Mapping[str, Any], shardings: Mapping[str, Any]) -> dict[str, Any]:
    """``before`` with the arrays of ``now`` that are others."""
    if now.keys() != before.keys():
        raise ValueError(f"the module has the variables {sorted(now)}, and had {sorted(before)}: make all of them in __init__")
    placed = dict(before)
    for name, value in now.items():
        if value is before[name]:
            continue
        if (value.shape, value.dtype) != (before[name].shape, before[name].dtype):
            raise ValueError(
                f"{name!r} was given {value.dtype}{list(value.shape)}; expected {before[name].dtype}{list(before[name].shape)}"
            )
        placed[name] = jax.device_put(value, shardings[name])
    return placed


def _with_values(variables: Mapping[str, tuple[tuple[Any, ...], Any]], values: Mapping[str, Any]) -> nnx.State:
    return nnx.from_flat_state([(path, variable.replace(values[name])) for name, (path, variable) in variables.items()])


def _loss_and_aux(value: Any) -> tuple[jax.Array, Any]:
    """The loss and the auxiliary output (None without) that a loss function returned.

    Raises:
        TypeError: the loss is no floating-point scalar.
    """
    loss: Any
    loss, aux = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(loss, jax.Array) or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        found = f"{loss.dtype} of shape {loss.shape}" if isinstance(loss, jax.Array) else type(loss).__name__
        raise TypeError(
            f"the loss function returned {found} as the loss; expected a floating scalar array, or a pair (loss, aux): take the "
            "mean over the batch"
        )
    return loss, aux


def _microbatches(batch: Any, cut: RowCut, count: int, mesh: Mesh) -> Any:
    """Leaves split by rows ``[size, …]`` → ``[count, size / count, …]``: microbatch ``i`` is rows ``i::count``, so that each
    device cuts its own rows and none are exchanged. Other leaves are repeated."""
    size, axes = cut.rows.size, batch_axes(mesh)
    even = bool(axes) and (size // count) % data_parallel_size(mesh) == 0

    def microbatches(leaf: jax.Array, split: bool) -> jax.Array:
        if not split:
            return jnp.broadcast_to(leaf, (count, *jnp.shape(leaf)))
        rows = jnp.swapaxes(jnp.reshape(leaf, (size // count, count, *leaf.shape[1:])), 0, 1)
        if not even:
            return rows
        rest = [PartitionSpec.UNCONSTRAINED] * (rows.ndim - 2)
        return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec(None, axes, *rest)))

    leaves, structure = jax.tree.flatten(batch)
    return jax.tree.unflatten(structure, [microbatches(*pair) for pair in zip(leaves, cut.split, strict=True)])


def _averaged(aux: Any, count: int) -> Any:
    """Mean over microbatches of stacked ``aux`` leaves ``[count, …]``."""

    def mean(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"aux{jax.tree_util.keystr(path)} is {leaf.dtype}: with accumulate={count} aux is averaged over the "
                "microbatches, which only floating arrays can be; return a mean"
            )
        return leaf.mean(0)

    return jax.tree_util.tree_map_with_path(mean, aux)
