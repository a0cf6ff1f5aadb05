"""An optax transformation whose state is kept by parameter, as that of ``torch.optim`` is; shardings of such state, which is
split like the parameter that it belongs to."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from xlatrain.step.optimizers.rule import State

if TYPE_CHECKING:
    import optax

Params = Mapping[str, jax.Array]

_MAX_SHARED = 64
"""Elements that a transformation may keep for all parameters together: each of these has a copy."""


_STATES = "hyperparams_states"
"""Of optax's ``InjectStatefulHyperparamsState``: the states of schedules, by the name of the number that they compute."""


class _Name(str):
    """A parameter's name as the key of a dict, told from the transformation's own keys by its class."""


class ByParameter:
    """``transformation`` over dicts of arrays: parameter name → its entries of the state, by their paths in it (``"0.mu"``).

    What belongs to the transformation as a whole, a step count for one, is an entry of every parameter, as ``step`` is in torch.
    A parameter without a gradient counts as one whose gradient is zero, but keeps its value and its own entries.

    Args:
        transformation: of a dict of arrays by parameter name, which is what functions that choose among parameters
            (``optax.masked``, ``optax.multi_transform``) are given.

    API: https://optax.readthedocs.io/en/latest/api/transformations.html
    """

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        self.transformation = transformation

    def check(self, params: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Whether such parameters can be updated; nothing is computed.

        Raises:
            ValueError: the transformation fails, needs more than gradients, state and parameters, or has arrays in its state that
                belong to no one parameter.
        """
        named = _named(params)
        try:
            state = jax.eval_shape(self.transformation.init, named)
            jax.eval_shape(lambda grads, state, params: self.transformation.update(grads, state, params), named, state, named)
        except Exception as error:  # it is the user's code
            raise ValueError(
                "the optax transformation cannot update parameters by their gradients alone. One that needs more, such as the "
                f"loss (`value=…`), needs a loop of your own: {type(error).__name__}: {error}"
            ) from error
        for owner, text, leaf in _leaves(state, named):
            if owner is None and (leaf.size > _MAX_SHARED or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)):
                raise ValueError(
                    f"the optax transformation keeps {text!r}, {leaf.dtype}{list(leaf.shape)}, for all parameters together: it "
                    "has no place in a state by parameter. Leave out parts that join parameters (optax.flatten) or draw "
                    "(add_noise)"
                )

    def injected(self, params: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, float]:
        """The numbers that ``optax.inject_hyperparams`` keeps in the state, by path, with their first values.

        Those that a schedule computes are left out, since optax overwrites them, and so are names that come twice.
        """
        named = _named(params)
        state = jax.eval_shape(self.transformation.init, named)
        paths = _injected([text for owner, text, leaf in _leaves(state, named) if owner is None and leaf.ndim == 0])
        if not paths:
            return {}

        def values() -> dict[str, jax.Array]:
            zeros: Any = {name: jnp.zeros(param.shape, param.dtype) for name, param in named.items()}
            return {text: leaf for owner, text, leaf in _leaves(self.transformation.init(zeros), named) if text in paths}

        return {path: float(value) for path, value in jax.jit(values)().items()}  # without compiler_options: constants

    def init(self, params: Params) -> dict[str, State]:
        """The state before the first step. Pure."""
        return _split(self.transformation.init(_named(params)), {name: {} for name in params})

    def update(
        self, grads: Mapping[str, jax.Array | None], state: Mapping[str, State], params: Params
    ) -> tuple[dict[str, jax.Array], dict[str, State]]:
        """Take a step: the new parameters and state. Pure.

        Args:
            grads: parameter name → array of the parameter's shape; None or absent: the parameter and its own entries stay.
            state: parameter name → path in the transformation's state → array.
            params: parameter name → array, whose dtypes are kept.
        """
        still = {name for name in params if grads.get(name) is None}
        if len(still) == len(params):
            return dict(params), dict(state)
        named = _named(params)
        given: Any = {name: _like(grads.get(name), param) for name, param in named.items()}
        updates, new = self.transformation.update(given, self._joined(state, named), named)
        from optax import apply_updates

        stepped: Any = apply_updates(named, updates)
        new_params = {name: param if name in still else stepped[name] for name, param in params.items()}
        return new_params, _split(new, {name: state.get(name, {}) for name in (*state, *params)}, still)

    def _joined(self, state: Mapping[str, State], named: Any) -> Any:
        """The transformation's own state of these parameters; a parameter that has none gets its first."""
        shared = {path: leaf for entries in state.values() for path, leaf in entries.items()}
        fresh = self.transformation.init(named)
        found = [
            (shared if owner is None else state.get(owner, {})).get(text, leaf) for owner, text, leaf in _leaves(fresh, named)
        ]
        return jax.tree.unflatten(jax.tree.structure(fresh), found)


def _named(params: Mapping[str, Any]) -> Any:
    return {_Name(name): param for name, param in params.items()}


def _like(grad: jax.Array | None, param: jax.Array) -> jax.Array:
    """The gradient in the parameter's dtype; zeros of its shape where there is none."""
    return jnp.zeros_like(param) if grad is None else jnp.asarray(grad, param.dtype)


def _split(own: Any, before: Mapping[str, State], still: Container[str] = ()) -> dict[str, State]:
    """The transformation's state by parameter, over what was there ``before``; those that stay ``still`` keep their part."""
    state = {name: dict(entries) for name, entries in before.items()}
    for owner, text, leaf in _leaves(own, before):
        if owner is None:
            for entries in state.values():
                entries[text] = jnp.asarray(leaf)
        elif owner not in still or text not in before[owner]:
            state[owner][text] = jnp.asarray(leaf)
    return state


def _leaves(own: Any, names: Container[str]) -> Iterator[tuple[str | None, str, Any]]:
    """Yield for each leaf of the transformation's state: its parameter, None if it is shared; its path without that; the leaf."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(own):
        keys = [getattr(key, "key", None) for key in path]
        # Ours, but where the user's own dict by parameter (labels, a mask) gave the tree its keys.
        places = [i for i, key in enumerate(keys) if isinstance(key, _Name)]
        places = places or [i for i, key in enumerate(keys) if isinstance(key, str) and key in names]
        rest = path if not places else (*path[: places[-1]], *path[places[-1] + 1 :])
        owner = str(keys[places[-1]]) if places else None
        yield owner, jax.tree_util.keystr(rest, simple=True, separator=".") or "state", leaf


def _injected(paths: Sequence[str]) -> list[str]:
    """Paths of the numbers of ``inject_hyperparams``, without those that schedules compute and names that come twice."""
    parts = [path.split(".") for path in paths]
    computed = {(*one[: one.index(_STATES)], *one[one.index(_STATES) + 1 :][:1]) for one in parts if _STATES in one}
    found = [one for one in parts if one[-2:-1] == ["hyperparams"] and (*one[:-2], one[-1]) not in computed]
    names = [one[-1] for one in found]
    return [".".join(one) for one in found if names.count(one[-1]) == 1]


def leaf_sharding(sharding: Sharding, param_shape: tuple[int, ...], leaf_shape: tuple[int, ...]) -> Sharding:
    """The sharding of one state array of a parameter that has ``sharding``.

    An array of the parameter's shape is split like it; anything else (a step counter, Adafactor's row and column averages) is
    replicated.
    """
    if leaf_shape == param_shape or not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def state_shardings(state: Mapping[str, Mapping[str, Any]], params: Mapping[str, jax.Array]) -> dict[str, dict[str, Sharding]]:
    """Shardings for a whole optimizer state, keyed like it: parameter name → state name → sharding.

    Args:
        state: parameter name → state name → anything with a ``shape`` (arrays, or what ``jax.eval_shape`` gives).
        params: parameter name → the parameter on its devices.
    """
    return {
        name: {key: leaf_sharding(params[name].sharding, params[name].shape, leaf.shape) for key, leaf in leaves.items()}
        for name, leaves in state.items()
    }
