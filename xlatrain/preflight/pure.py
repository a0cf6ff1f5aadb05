"""Preflight of pure JAX: a training step, or an :class:`~xlatrain.step.engine.Engine`. Nothing here knows torch.

::

    report = preflight_step(step, params, opt_state, batch, topology="v5e:4x4")

    pod = Topology.parse("v5e:4x4")
    engine = Engine(Model, optax.adamw(1e-3), mesh=make_mesh({"data": 2, "fsdp": 8}, pod.devices()))
    report = preflight_engine(engine, loss_fn, batch, topology=pod)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from xlatrain.mesh.mesh import data_parallel_size, make_mesh
from xlatrain.mesh.placement import batch_spec, sequence_length
from xlatrain.mesh.sharding import ShardingRules, replicated
from xlatrain.preflight.examine import examine
from xlatrain.preflight.plan import PLAN, write_plan
from xlatrain.preflight.program import Step
from xlatrain.preflight.report import Report
from xlatrain.preflight.topology import Topology
from xlatrain.step.state import TrainState

if TYPE_CHECKING:
    from xlatrain.step.engine import Engine, LossFunction


def preflight_step(
    step: Callable[..., Any],
    params: Any,
    opt_state: Any,
    batch: Any,
    *,
    topology: str | Topology,
    num_slices: int = 1,
    axes: Mapping[str, int] | None = None,
    rules: ShardingRules | None = None,
    output: str | os.PathLike[str] | None = None,
    store: bool = False,
) -> Report:
    """Compile a pure training step for a pod that is not here; nothing is allocated or run.

    Parameters are split by ``rules``, optimizer state like the parameter whose shape and place in the tree it has, the batch by
    rows. ``params`` and ``opt_state`` are donated and keep their shardings, as a training loop wants it.

    Args:
        step: ``(params, opt_state, batch) -> (params, opt_state, …)``, not jitted.
        params, opt_state, batch: pytrees of arrays or ``jax.ShapeDtypeStruct`` (``jax.eval_shape`` makes them); ``batch`` has the
            rows of the whole mesh in dim 0 of its leaves.
        topology: ``"v5e:16x16"``, … or ``"cpu:8"``.
        num_slices: slices of that topology.
        axes: of the mesh, e.g. ``{"data": 2, "fsdp": 8}``; default all devices of a slice as ``fsdp``, slices as ``data``.
        rules: how parameters are split; default the automatic rule.
        output: folder for ``preflight.json``, ``preflight.html`` and ``plan.json``.
        store: also keep the program's StableHLO there.

    Raises:
        TopologyError, LibtpuError: see :class:`Topology`.
        ValueError: ``axes`` that are not the topology's devices, a batch that they do not divide, a step that returns something
            else, ``store`` without ``output``.
    """
    pod = topology if isinstance(topology, Topology) else Topology.parse(topology, num_slices)
    devices = pod.devices()
    mesh = make_mesh(axes or {"data": pod.num_slices, "fsdp": len(devices) // pod.num_slices}, devices)
    shardings = (rules or ShardingRules()).shardings(_by_path(params), mesh)
    given_params = _placed(params, lambda path, leaf: shardings[path])
    given_state = _placed(opt_state, lambda path, leaf: _like(path, leaf, _by_path(params), shardings, mesh))
    given_batch = _batch(batch, mesh)
    kept = jax.tree.map(lambda leaf: leaf.sharding, (given_params, given_state))
    # without compiler_options: for TPUs there are none
    program = jax.jit(step, donate_argnums=(0, 1), out_shardings=_out(step, (given_params, given_state, given_batch), kept))
    state = _state(_by_path(given_params), given_state)
    steps = [Step("train", program, (given_params, given_state, given_batch))]
    return _examined(steps, pod, mesh, state, given_batch, state.params, output, store)


def preflight_engine(
    engine: Engine,
    loss_fn: LossFunction,
    batch: Any,
    *,
    topology: Topology,
    output: str | os.PathLike[str] | None = None,
    store: bool = False,
) -> Report:
    """Compile an engine's training step for the topology whose devices its mesh has.

    Args:
        engine: made with ``mesh=make_mesh(axes, topology.devices())``.
        loss_fn: as for ``engine.compile_train_step``.
        batch: a pytree of arrays or ``jax.ShapeDtypeStruct``, with the rows of the whole mesh in dim 0 of its leaves.
        topology, output, store: as for :func:`preflight_step`.

    Raises:
        ValueError: the engine's mesh is not made of the topology's devices; as :func:`preflight_step`.
    """
    expected, mesh = topology.chips * topology.devices_per_chip, engine.mesh
    platform = mesh.devices.flat[0].platform
    if mesh.devices.size != expected or platform != topology.platform:
        raise ValueError(
            f"the engine's mesh has {mesh.devices.size} {platform} devices, {topology.title} has {expected} of "
            f"{topology.platform}: make it with mesh=make_mesh(axes, topology.devices())"
        )
    given_batch = _batch(batch, mesh)
    program = engine.train_program(loss_fn, given_batch)
    state = engine.abstract_state
    steps = [Step("train", program, (state, given_batch, (), ()))]
    with jax.set_mesh(mesh):
        return _examined(steps, topology, mesh, state, given_batch, state.params, output, store)


def _examined(
    steps: list[Step],
    topology: Topology,
    mesh: Mesh,
    state: TrainState,
    batch: Any,
    trainable: Mapping[str, Any],
    output: str | os.PathLike[str] | None,
    store: bool,
) -> Report:
    if store and output is None:
        raise ValueError("store=True keeps programs in the folder output=…, which is not given")
    folder = None if output is None else Path(output)
    rows = max((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape), default=None)
    report = examine(
        steps,
        topology=topology,
        mesh=mesh,
        state=state,
        batch=jax.tree.leaves(batch),
        trainable=trainable,
        settings={"global_batch_rows": rows},
        store=folder if store else None,
    )
    if folder is not None:
        write_plan(report, report.save(folder).parent / PLAN)
    return report


def _by_path(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _placed(tree: Any, sharding_of: Callable[[str, Any], NamedSharding]) -> Any:
    def placed_leaf(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf), sharding=sharding_of(_name(path), leaf))

    return jax.tree_util.tree_map_with_path(placed_leaf, tree)


def _like(path: str, leaf: Any, params: Mapping[str, Any], shardings: Mapping[str, NamedSharding], mesh: Mesh) -> NamedSharding:
    """The sharding of a leaf of optax's state: of the parameter whose path ends the leaf's path."""
    own = max((name for name in params if path == name or path.endswith(f".{name}")), key=len, default=None)
    same = own is not None and jnp.shape(params[own]) == jnp.shape(leaf)
    return shardings[own] if own is not None and same else replicated(mesh)


def _batch(batch: Any, mesh: Mesh) -> Any:
    parts = data_parallel_size(mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        rows = (*jnp.shape(leaf), 0)[0]
        if rows % parts:
            raise ValueError(
                f"batch leaf {_name(path) or 'batch'!r} has {rows} rows, which the mesh splits into {parts} parts: the batch is "
                "that of the whole mesh, so give a multiple"
            )
    length = sequence_length([jnp.shape(leaf) for leaf in jax.tree.leaves(batch)], mesh)

    def sharding(path: str, leaf: Any) -> NamedSharding:
        shape = jnp.shape(leaf)
        return NamedSharding(mesh, batch_spec(shape, mesh, length)) if shape else replicated(mesh)

    return _placed(batch, sharding)


def _out(step: Callable[..., Any], args: tuple[Any, Any, Any], kept: tuple[Any, Any]) -> Any:
    """The shardings of what ``step`` returns: parameters and optimizer state as they came, the rest as XLA likes."""
    out = jax.eval_shape(step, *args)
    same = (
        isinstance(out, tuple)
        and len(out) >= 2
        and all(
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), new) == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), old)
            for new, old in zip(out[:2], args[:2], strict=True)
        )
    )
    if not same:
        raise ValueError(
            "step(params, opt_state, batch) has to return (params, opt_state, …), with the shapes and dtypes that it was given"
        )
    return (*kept, *(None for _ in out[2:]))


def _state(params: dict[str, Any], opt_state: Any) -> TrainState:
    nothing: Any = jax.ShapeDtypeStruct((0,), jnp.uint32)
    return TrainState(params=params, buffers={}, opt_state=opt_state, accumulated={}, draws=nothing, key=nothing)
