"""The construction of an ``nnx`` module as pure functions, one for each variable, so that each is made where it belongs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from xlatrain.step.initial_value import InitialValue
from xlatrain.step.variables import Filter, ModuleVariables

_ADDS_UP = frozenset({
    "dot_general", "conv_general_dilated", "reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "scatter-add", "qr",
    "geqrf", "householder_product", "eigh", "svd", "lu", "cholesky", "triangular_solve", "fft",
})  # fmt: skip


@dataclass
class TracedModule:
    """A module whose variables have shapes and no values.

    Attributes:
        module: of the class of the one that was given.
        values: what they would be, by name, as :class:`ModuleVariables` encodes them.
    """

    module: Any
    values: dict[str, InitialValue] = field(default_factory=dict)


def trace_init(module: nnx.Module, build: Callable[[Any], None], trainable: Filter = nnx.Param) -> TracedModule:
    """Trace ``build``, which makes variables in a copy of ``module``; nothing is computed.

    Args:
        module: left as it is.
        build: called once.
        trainable: which variables are parameters, as an nnx filter.

    Raises:
        Exception: what ``build`` raises, e.g. where it reads values that it drew.
    """
    made: list[Any] = []
    graphdef, state = nnx.split(module)

    def construct() -> Any:
        entries = [(path, variable.replace(variable.get_raw_value())) for path, variable in nnx.to_flat_state(state)]
        copy = nnx.merge(graphdef, nnx.from_flat_state(entries))  # variables of this trace, which it may change
        build(copy)
        params, buffers = ModuleVariables(copy, trainable).values()
        new_graphdef, new_state = nnx.split(copy)
        made.append(new_graphdef)
        return {**params, **buffers}, new_state

    closed, shapes = jax.make_jaxpr(construct, return_shape=True)()
    encoded, new_state = shapes
    names = sorted(encoded)  # a dict's order in a pytree
    values = {name: _slice(closed, index) for index, name in enumerate(names)}
    return TracedModule(nnx.merge(made[0], new_state), values)


def _slice(closed: Any, index: int) -> InitialValue:
    """The part of a jaxpr of no inputs on which one output depends."""
    jaxpr = closed.jaxpr
    target = jaxpr.outvars[index]
    needed = {target}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        equations.append(equation)
        needed.update(one for one in equation.invars if not isinstance(one, Literal))
    pairs = [(var, value) for var, value in zip(jaxpr.constvars, closed.consts, strict=True) if var in needed]
    part = jaxpr.replace(eqns=equations[::-1], outvars=[target], constvars=[var for var, _ in pairs])
    consts = [value for _, value in pairs]
    digest = hashlib.sha256(str(part).encode())
    for value in consts:
        digest.update(_bytes(value))

    function = jaxpr_as_fun(ClosedJaxpr(part, consts))

    def make() -> jax.Array:
        (found,) = function()
        return found

    spec = jax.ShapeDtypeStruct(target.aval.shape, target.aval.dtype)
    return InitialValue(make, spec, digest.hexdigest(), _adds_up(part))


def _bytes(value: Any) -> bytes:
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()


def _adds_up(jaxpr: Any) -> bool:
    inner = (one for equation in jaxpr.eqns for param in equation.params.values() for one in _jaxprs(param))
    return any(equation.primitive.name in _ADDS_UP for equation in jaxpr.eqns) or any(map(_adds_up, inner))


def _jaxprs(param: Any) -> list[Any]:
    found = param if isinstance(param, tuple | list) else [param]
    return [getattr(one, "jaxpr", one) for one in found if hasattr(getattr(one, "jaxpr", one), "eqns")]
