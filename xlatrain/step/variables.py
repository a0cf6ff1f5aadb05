"""The variables of an ``nnx`` module as named arrays: parameters, and buffers such as batch statistics and random streams."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

_BITS = jnp.int32
Filter: TypeAlias = Any
"""An nnx filter: a class of variables, or what ``nnx.split`` takes."""


class ModuleVariables:
    """The variables of one module by dotted path (``blocks.0.attn.kernel``), and the pure way from arrays to a module and back.

    A key of a random stream is the int32 array of its bits, as uint32 is: every framework and file format has that dtype.

    Args:
        module: shared variables have one name, that of their first path.
        trainable: which variables are parameters, as an nnx filter; all others are buffers.

    Raises:
        TypeError: a variable's value is no array; or a parameter is not of floating point.
    """

    def __init__(self, module: nnx.Module, trainable: Filter = nnx.Param) -> None:
        self.module = module
        self._trainable = trainable
        self.graphdef, params, buffers = nnx.split(module, trainable, ...)
        self.params, self.buffers = by_name(params), by_name(buffers)
        for name, (_, variable) in {**self.params, **self.buffers}.items():
            value = variable.get_raw_value()
            if not isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{type(module).__name__}.{name} is an nnx.{type(variable).__name__} whose value is of type "
                    f"{type(value).__name__}; expected an array. Keep it in a plain attribute, or in one variable for each array"
                )
            if name in self.params and not jnp.issubdtype(value.dtype, jnp.floating):
                raise TypeError(
                    f"{type(module).__name__}.{name} is a parameter of dtype {value.dtype}, which has no gradient; expected a "
                    "floating dtype. Make it an nnx.Variable of another kind"
                )
        self._attributes = PlainAttributes(module)

    def values(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The present arrays of parameters and buffers, by name."""
        params, buffers = nnx.split(self.module, self._trainable, ...)[1:]
        return _encoded(by_name(params)), _encoded(by_name(buffers))

    def build(self, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> Any:
        """Make a module of these arrays. Pure: every variable of it is new."""
        entries = [
            (path, variable.replace(_decoded(variable, values[name])))
            for variables, values in ((self.params, params), (self.buffers, buffers))
            for name, (path, variable) in variables.items()
        ]
        return nnx.merge(self.graphdef, nnx.from_flat_state(entries))

    def seen(self, module: Any) -> SeenModule:
        """The structure and the values of a module of :meth:`build`, before a step runs on it."""
        graphdef, _, buffers = nnx.split(module, self._trainable, ...)
        values = {name: variable.get_raw_value() for name, (_, variable) in by_name(buffers).items()}
        return SeenModule(graphdef, values, PlainAttributes(module))

    def changed(self, module: Any, before: SeenModule) -> dict[str, Any]:
        """The arrays of those buffers that a step on a module of :meth:`build` has changed.

        Raises:
            StructureError: it has other variables or attributes than before.
        """
        before.attributes.check_contents()
        now = self.seen(module)
        if now.graphdef != before.graphdef or now.buffers.keys() != before.buffers.keys():
            raise StructureError(_difference(self.build_first(), module))
        return {name: _encode(value) for name, value in now.buffers.items() if value is not before.buffers[name]}

    def build_first(self) -> Any:
        """A module of these variables' first values, to compare another with."""
        return nnx.merge(self.graphdef, nnx.from_flat_state([*self.params.values(), *self.buffers.values()]))

    def write(self, name: str, value: Any) -> None:
        """Give the module's own variable ``name`` another value."""
        self.variable(name).set_raw_value(_decoded((self.params.get(name) or self.buffers[name])[1], value))

    def variable(self, name: str) -> Any:
        """The module's own variable of that name."""
        found: Any = self.module
        for key in (self.params.get(name) or self.buffers[name])[0]:
            by_item = isinstance(key, int) or isinstance(found, Mapping)  # a Linen module's variables are dicts
            found = found[key] if by_item else getattr(found, str(key))
        return found

    def unchanged(self) -> bool:
        """Whether every plain attribute of the module, and of those below it, is what it was: some 0.3 µs for each module."""
        return self._attributes.unchanged()

    def annotations(self) -> dict[str, PartitionSpec]:
        """The shardings that the module itself gives its parameters (``nnx.with_partitioning``)."""
        found = {name: annotation(variable) for name, (_, variable) in self.params.items()}
        return {name: spec for name, spec in found.items() if spec is not None}


class SeenModule(NamedTuple):
    """A module as it was seen.

    Attributes:
        graphdef: its structure and plain attributes.
        buffers: their values, as the module has them.
        attributes: what is no variable.
    """

    graphdef: Any
    buffers: dict[str, Any]
    attributes: PlainAttributes


class PlainAttributes:
    """The attributes of a module, and of those below it, that are no variables, as they are now."""

    def __init__(self, module: nnx.Module) -> None:
        self._containers = list(_containers(module, "self", set()))

    def unchanged(self) -> bool:
        """Whether every attribute is what it was, and holds what it held."""
        try:
            return all(now == then for _, now, then in self._containers)
        except ValueError:  # an array in place of another object
            return False

    def check_contents(self) -> None:
        """Raises:
        StructureError: a step has changed a list, dict or set in place: names the attribute.
        """
        for path, now, then in self._containers:
            if path is not None and _items_differ(now, then):
                raise StructureError(
                    f"{path} is a {type(now).__name__} that a step changes, and a step runs without its Python once it is "
                    f"traced: make it a variable in __init__ (nnx.Variable(…)) and write {path}[...] = …, or change it in a hook"
                )


class StructureError(TypeError):
    """A step changed what a pure step cannot: an attribute that is no variable."""


def by_name(state: nnx.State) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Dotted name → (path, variable) of a state's variables."""
    return {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(state)}


def annotation(variable: Any) -> PartitionSpec | None:
    """The sharding that the module itself gives a parameter (``nnx.with_partitioning``), or None."""
    spec = nnx.get_partition_spec(variable).get_value() if "out_sharding" in variable.get_metadata() else None
    return spec if spec is not None and any(axes is not None for axes in spec) else None


def _encoded(variables: Mapping[str, tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    return {name: _encode(variable.get_raw_value()) for name, (_, variable) in variables.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(_encode, value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return jax.lax.bitcast_convert_type(value, _BITS) if value.dtype == jnp.uint32 else value


def _decoded(variable: Any, value: Any) -> Any:
    """``value`` in the dtype of the variable."""
    if isinstance(value, jax.ShapeDtypeStruct):  # a preflight has no values
        return jax.eval_shape(lambda value: _decoded(variable, value), value)
    dtype = variable.get_raw_value().dtype
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if is_key or dtype == jnp.uint32:
        value = jax.lax.bitcast_convert_type(value, jnp.uint32)
    return jax.random.wrap_key_data(value, impl=_key_impl(variable.get_raw_value())) if is_key else value


def _key_impl(keys: Any) -> Any:
    """The implementation of keys, which may be shapes only."""
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), keys)
    return found[0]


def _containers(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str | None, Any, Any]]:
    """Yield the dicts, lists and sets below ``value``: its path (None: a module's own), itself, a copy as it is now."""
    if id(value) in seen or isinstance(value, nnx.Variable | jax.Array | np.ndarray):
        return
    seen.add(id(value))
    if isinstance(value, nnx.Pytree):
        members = vars(value)
        yield None, members, dict(members)
        inner = [(f"{path}.{name}", member) for name, member in members.items() if not name.startswith("_pytree__")]
    elif isinstance(value, dict | list | set):
        yield path, value, copy.copy(value)
        inner = [(f"{path}[{key!r}]", member) for key, member in _items(value)]
    elif isinstance(value, tuple):
        inner = [(f"{path}[{index}]", member) for index, member in enumerate(value)]
    else:
        return
    for below, member in inner:
        yield from _containers(member, below, seen)


def _items_differ(now: Any, then: Any) -> bool:
    try:
        return now != then
    except (ValueError, jax.errors.TracerBoolConversionError):  # an array that was not there
        return True


def _items(container: dict[Any, Any] | list[Any] | set[Any]) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _difference(before: Any, after: Any, path: str = "self") -> str:
    """The first attribute in which two modules differ, in words."""
    old, new = vars(before), vars(after)
    for name in (*new, *old):
        if name.startswith("_pytree__"):
            continue
        where = f"{path}.{name}"
        if name not in old or name not in new:
            return f"{where} was {'added' if name in new else 'removed'}"
        if isinstance(old[name], nnx.Variable) or isinstance(new[name], nnx.Variable):
            continue
        if isinstance(old[name], nnx.Pytree) and type(old[name]) is type(new[name]):
            if (found := _difference(old[name], new[name], where)) != "":
                return found
        elif isinstance(new[name], jax.Array) or old[name] != new[name]:
            return f"{where} was assigned a {type(new[name]).__name__}"
    return "" if path != "self" else "its variables are not those that it had"
