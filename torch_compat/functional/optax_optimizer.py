"""An optax transformation in place of a torch optimizer."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from torch_compat.functional.host_arrays import to_torch
from torch_compat.functional.optimizer_state import state_on_host
from xlatrain.optimizers.shardings import leaf_sharding

Params = Mapping[str, jax.Array]
Gradients = Mapping[str, jax.Array | None]


class OptaxOptimizer:
    """Implements :class:`~torch_compat.functional.optimizers.OptimizerProgram` by an optax transformation.

    Schedules live inside the transformation, so there is nothing for the host to feed. A parameter without gradient counts as
    one with a zero gradient inside the transformation, and then keeps its value and its own state; counts that the
    transformation keeps for all parameters together go on.
    """

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        self._transformation = optax.with_extra_args_support(transformation)
        self._no_numbers = np.zeros(0, np.float32)
        self._no_numbers.flags.writeable = False

    def init(self, params: Params) -> optax.OptState:
        return self._transformation.init(dict(params))

    def hyper(self) -> np.ndarray:
        return self._no_numbers

    def static_key(self) -> Hashable:
        return ("optax", id(self._transformation))

    def options(self) -> tuple[np.ndarray, Hashable]:
        return self.hyper(), self.static_key()

    def update(
        self, grads: Gradients, opt_state: optax.OptState, params: Params, hyper: Any
    ) -> tuple[dict[str, jax.Array], optax.OptState]:
        skipped = {name for name in params if grads.get(name) is None}
        whole: Any = {name: jnp.zeros_like(param) if name in skipped else grads[name] for name, param in params.items()}
        updates, new_state = self._transformation.update(whole, opt_state, dict(params))
        new_params = cast(dict[str, jax.Array], optax.apply_updates(dict(params), updates))
        if not skipped:
            return new_params, new_state
        kept = {name: params[name] if name in skipped else value for name, value in new_params.items()}
        kept_state = jax.tree_util.tree_map_with_path(
            lambda path, old, new: old if _parameter_of(path) in skipped else new, opt_state, new_state
        )
        return kept, kept_state

    def import_state(self, params: Params, present: Container[str] = ()) -> optax.OptState:
        """The first state: there is no torch optimizer to import from."""
        if present:
            raise ValueError("an optax state covers all parameters at once and cannot be extended; start from init(params)")
        template = jax.eval_shape(self.init, params)
        shardings = jax.tree_util.tree_map_with_path(lambda path, leaf: _sharding(path, leaf.shape, params), template)
        return jax.jit(self.init, out_shardings=shardings)(params)

    def export_state(self, opt_state: optax.OptState) -> dict[str, Any]:
        """The state's arrays as CPU tensors, by their path in it."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(state_on_host(opt_state))
        return {jax.tree_util.keystr(path): to_torch(np.asarray(leaf)) for path, leaf in leaves}


def _parameter_of(path: jax.tree_util.KeyPath) -> str | None:
    """The parameter that a state leaf belongs to: ``params`` is a flat dict, so its key is the last dict key of the path."""
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return keys[-1] if keys else None


def _sharding(path: jax.tree_util.KeyPath, shape: tuple[int, ...], params: Params) -> Sharding:
    owner = params.get(_parameter_of(path) or "")
    if owner is not None:
        return leaf_sharding(owner.sharding, owner.shape, shape)
    sharding = next(iter(params.values())).sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
