"""Equal layers' parameters stored as one array: what a loop over layers scans, and an optimizer updates, without a copy.

A *stack* holds the arrays of several parameters of equal shape, dtype and sharding along a new first dim. A *stacked* mapping is
keyed by parameter path like any other, but for its stacks, which have a :class:`StackKey`. Programs may take and return stacked
states; everybody else sees the arrays by their paths (:func:`split_state`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import STAGE_AXIS
from xlatrain.step.offload import MEMORY
from xlatrain.step.state import TrainState


class StackKey(str):
    """The key of a stack: a string, so that it sorts among parameter paths. ``paths`` are its members, in order."""

    paths: tuple[str, ...]

    def __new__(cls, paths: tuple[str, ...]) -> StackKey:
        key = super().__new__(cls, f"{paths[0]} … {paths[-1]}")
        key.paths = paths
        return key


@dataclass(frozen=True)
class Row:
    """A member of a stack, not yet cut out of it.

    Attributes:
        stack: ``[members, …]``.
        index: the member's position along dim 0.
    """

    stack: jax.Array
    index: int

    def array(self) -> jax.Array:
        """The member's array ``[…]``, by a static slice: for use inside of a program."""
        return jax.lax.index_in_dim(self.stack, self.index, keepdims=False)


def common_stack(parts: list[Any]) -> jax.Array | None:
    """The rows ``parts`` as one array ``[len(parts), …]``, where they follow each other in one stack; None where they do not."""
    first = parts[0]
    if not isinstance(first, Row):
        return None
    if any(
        not isinstance(part, Row) or part.stack is not first.stack or part.index != first.index + i
        for i, part in enumerate(parts)
    ):
        return None
    if len(parts) == first.stack.shape[0]:
        return first.stack
    return jax.lax.slice_in_dim(first.stack, first.index, first.index + len(parts))


@dataclass(frozen=True)
class Stacking:
    """A choice of parameters that are stored stacked."""

    keys: tuple[StackKey, ...]

    def stack(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` by path (pytrees; :class:`Row` for one that is in a stack already) as a stacked mapping."""
        inside = {path for key in self.keys for path in key.paths}
        stacked: dict[str, Any] = {path: as_array(value) for path, value in values.items() if path not in inside}
        for key in self.keys:
            parts = [values.get(path) for path in key.paths]
            if all(part is not None for part in parts):
                stacked[key] = join(parts)
            else:
                stacked.update({path: as_array(part) for path, part in zip(key.paths, parts, strict=True) if path in values})
        return stacked

    def stack_shardings(self, shardings: TrainState) -> TrainState:
        """The shardings of the stacked form: a stack is split as its members are."""
        inside = {path for key in self.keys for path in key.paths}

        def stacked(tree: Mapping[str, Any]) -> dict[str, Any]:
            new = {path: value for path, value in tree.items() if path not in inside}
            for key in self.keys:
                if key.paths[0] in tree:
                    new[key] = jax.tree.map(lambda sharding: stack_sharding(sharding, len(key.paths)), tree[key.paths[0]])  # noqa: B023
            return new

        return replace(shardings, params=stacked(shardings.params), opt_state=stacked(shardings.opt_state))


def rows(values: Mapping[str, Any]) -> dict[str, Any]:
    """A stacked mapping of arrays by path, with a :class:`Row` for each member of a stack."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(key, StackKey):
            found.update({path: Row(value, i) for i, path in enumerate(key.paths)})
        else:
            found[key] = value
    return found


def stacked_shardings(values: Mapping[str, Any], shardings: Mapping[str, NamedSharding]) -> dict[str, NamedSharding]:
    """The shardings of a stacked mapping's arrays, given those of parameters by path."""

    def of(key: str) -> NamedSharding:
        return stack_sharding(shardings[key.paths[0]], len(key.paths)) if isinstance(key, StackKey) else shardings[key]

    return {key: of(key) for key in values}


def members(key: str) -> tuple[str, ...]:
    """The parameter paths that a key of a stacked mapping stands for."""
    return key.paths if isinstance(key, StackKey) else (key,)


def cut(stack: jax.Array, index: int) -> jax.Array:
    """Cut a member ``[…]`` out of a stack ``[members, …]``, on its devices, split as the stack is. One program serves all.

    Of a stack whose members lie on the stages of a mesh every process must cut.
    """
    sharding = _of_member(stack) if isinstance(stack.sharding, NamedSharding) else None
    if not stack.is_fully_addressable and not _is_by_stage(stack.sharding):
        return _on_own_shards(lambda shard: _cut(shard, np.int32(index), None), (stack,), stack.shape[1:], sharding)
    return _in_turn(_cut(stack, np.int32(index), sharding), stack.sharding)


def _in_turn(array: jax.Array, of_stack: Any) -> jax.Array:
    """``array``, which was cut out of a stack of that sharding or is it; waited for where it went between CPU devices.

    XLA:CPU has 32 programs in flight. The launch of another holds a thread, and where all are held, those before never meet in
    their collectives: XLA aborts the process after 40 s.
    """
    sends = _is_by_stage(of_stack) and next(iter(of_stack.device_set)).platform == "cpu"
    return array.block_until_ready() if sends else array


def _on_own_shards(
    function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], shape: tuple[int, ...], sharding: Any
) -> jax.Array:
    """Apply ``function`` to each of this process's shards of ``arrays``; the results are the shards of one array of ``shape``.

    Their first dim, of members, is not split, so that no process needs another: one alone may read a parameter out of a stack,
    in a hook or a logger.
    """
    shards = [[shard.data for shard in array.addressable_shards] for array in arrays]
    parts = [function(*of_device) for of_device in zip(*shards, strict=True)]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


@functools.partial(jax.jit, static_argnums=2)  # without compiler_options: copies alone
def _cut(stack: jax.Array, index: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Slice out member ``index`` (int32 scalar) inside of a jitted program; the result lies as ``sharding`` says."""
    member = jax.lax.dynamic_index_in_dim(_on_device(stack, sharding), index, keepdims=False)
    return member if sharding is None else _placed(member, sharding)


def member(values: Mapping[str, Any], path: str) -> jax.Array:
    """The array of ``path`` in a mapping whose arrays may be stacked.

    Raises:
        KeyError: there is none of that path.
    """
    for key, value in values.items():
        if isinstance(key, StackKey) and path in key.paths:
            return cut(value, key.paths.index(path))
    return values[path]


def stack_state(state: TrainState, stacking: Stacking) -> TrainState:
    """The stacked form of a state on its devices; its arrays are deleted as soon as they are in their stacks."""

    def stacked(values: Mapping[str, Any]) -> dict[str, Any]:
        new = dict(values)
        for key in stacking.keys:
            if all(path in new for path in key.paths):
                new[key] = jax.tree.map(_consume, *(new.pop(path) for path in key.paths))
        return new

    return _on_parts(stacked, state)


def split_state(state: TrainState) -> TrainState:
    """The state by path; stacks are deleted as soon as their members are cut out."""

    def split(values: Mapping[str, Any]) -> dict[str, Any]:
        new = dict(values)
        for key in [key for key in values if isinstance(key, StackKey)]:
            leaves, structure = jax.tree.flatten(new.pop(key))
            for i, path in enumerate(key.paths):
                new[path] = jax.tree.unflatten(structure, [cut(leaf, i) for leaf in leaves])
            for leaf in leaves:
                leaf.delete()
        return new

    return _on_parts(split, state)


def _on_parts(function: Callable[[Mapping[str, Any]], dict[str, Any]], state: TrainState) -> TrainState:
    parts = {name: function(getattr(state, name)) for name in ("params", "opt_state", "accumulated")}
    return replace(state, **parts)


def _consume(*arrays: jax.Array) -> jax.Array:
    """Stack equal arrays ``[…]`` along a new first dim, ``[len(arrays), …]``, and delete them."""
    first = arrays[0]
    sharding = stack_sharding(first.sharding, len(arrays))
    if len(arrays) * first.nbytes <= _SMALL and _on_one_cpu(first.sharding):
        stack = jax.device_put(np.stack([np.asarray(array) for array in arrays]), sharding if first.committed else None)
    elif first.is_fully_addressable or _is_by_stage(sharding):
        stack = _in_turn(_stack(arrays, sharding), sharding)
    else:
        stack = _on_own_shards(lambda *shards: _stack(shards, None), arrays, (len(arrays), *first.shape), sharding)
    for array in arrays:
        array.delete()
    return stack


_SMALL = 1 << 26
"""Bytes that are stacked sooner by numpy, with a second copy for a moment, than a program of so many operands is compiled."""


def _on_one_cpu(sharding: Any) -> bool:
    devices = sharding.device_set
    return len(devices) == 1 and next(iter(devices)).platform == "cpu" and not _in_host_memory(sharding)


@functools.partial(jax.jit, static_argnums=1)  # without compiler_options: copies alone
def _stack(arrays: tuple[jax.Array, ...], sharding: Any) -> jax.Array:
    """Stack arrays of equal shape and dtype inside of a jitted program, pinned to ``sharding`` if it is a ``NamedSharding``."""
    stack = jnp.stack([_on_device(array, sharding) for array in arrays])
    return _placed(stack, sharding) if isinstance(sharding, NamedSharding) else stack


def _on_device(array: jax.Array, sharding: Any) -> jax.Array:
    """``array`` where it can be computed with, if ``sharding`` says that it is in host memory."""
    return jax.device_put(array, jax.memory.Space.Device) if _in_host_memory(sharding) else array


def _placed(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Pin an array of a program to ``sharding``, in device or host memory."""
    if _in_host_memory(sharding):
        return jax.device_put(array, sharding)
    return jax.lax.with_sharding_constraint(array, sharding)


def _in_host_memory(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.memory_kind == MEMORY


def join(parts: list[Any]) -> Any:
    """Stack pytrees of one structure leaf by leaf: ``[…]`` → ``[len(parts), …]``. Rows of one stack become a slice of it."""
    stack = common_stack(parts)
    if stack is not None:
        return stack
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(as_array, parts))


def as_array(value: Any) -> Any:
    """``value``, cut out of its stack if it is in one."""
    return value.array() if isinstance(value, Row) else value


def stack_sharding(sharding: Any, count: int) -> Any:
    """The sharding of a stack of ``count`` members that have ``sharding``: the new first dim is split over stages alone."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh, spec = sharding.mesh, [_without_stage(axes) for axes in sharding.spec]
    by_stage = STAGE_AXIS in mesh.shape and count % mesh.shape[STAGE_AXIS] == 0
    spec = [STAGE_AXIS, *spec] if by_stage else [None, *sharding.spec]
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _of_member(stack: jax.Array) -> NamedSharding:
    """The sharding of a stack's member; what lay on one stage is split over all by its largest whole dim, where that divides."""
    sharding: Any = stack.sharding
    named = sharding.spec[1:]
    spec = [*named, *[None] * (stack.ndim - 1 - len(named))]
    if _is_by_stage(sharding):
        stages, shape = sharding.mesh.shape[STAGE_AXIS], stack.shape[1:]
        whole = [dim for dim, axes in enumerate(spec) if axes is None and shape[dim] % stages == 0]
        if whole:
            spec[max(whole, key=lambda dim: shape[dim])] = STAGE_AXIS
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _is_by_stage(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and len(sharding.spec) > 0 and sharding.spec[0] == STAGE_AXIS


def _without_stage(axes: Any) -> Any:
    left = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis != STAGE_AXIS)
    return left if len(left) > 1 else left[0] if left else None
