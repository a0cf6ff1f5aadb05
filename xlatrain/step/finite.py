"""Gradients that are not finite, seen inside the program: the step tells, or changes nothing.

What a skipped step does is what ``optax.apply_if_finite`` does: parameters and optimizer state stay as they were. Buffers do too
(a batch that makes gradients infinite would spoil BatchNorm's averages for good).
https://optax.readthedocs.io/en/latest/api/transformations.html#optax.apply_if_finite
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlatrain.step.stacking import members

Gradients = Mapping[str, jax.Array | None]


class FiniteGuard:
    """A check of the gradients of each step, by parameter.

    Args:
        skip: a step whose gradients are not all finite changes nothing; else they are only looked at.
    """

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self._names: dict[int, list[tuple[str, ...]]] = {}

    def check(self, grads: Gradients) -> jax.Array:
        """Whether each gradient is finite: bool[n], over all parameters that have one. :meth:`not_finite` reads it.

        Programs of other parameters have another ``n``, if need be by flags of no parameter, which are true.
        """
        given = {key: grad for key, grad in grads.items() if grad is not None}
        names = [members(key) for key in given]
        length = len(names)
        while self._names.setdefault(length, names) != names:
            length += 1
        flags = [jnp.isfinite(grad).all() for grad in jax.tree.leaves(list(given.values()))]
        return jnp.stack([*flags, *[jnp.array(True)] * (length - len(names))]) if length else jnp.ones((0,), bool)

    def not_finite(self, flags: np.ndarray) -> list[str]:
        """The paths of the parameters whose gradients were not finite; of stacked layers, all of the stack."""
        names = self._names[len(flags)]
        return [path for paths, finite in zip(names, flags.tolist(), strict=False) if not finite for path in paths]

    @staticmethod
    def spoil(bad: jax.Array, grads: Gradients) -> dict[str, Any]:
        """The gradients, the smallest of them NaN where ``bad`` (bool scalar): with them the window that they join."""
        sizes = {key: sum(leaf.size for leaf in jax.tree.leaves(grad)) for key, grad in grads.items() if grad is not None}
        smallest = min(sizes, key=lambda key: sizes[key], default=None)

        def spoilt(leaf: jax.Array) -> jax.Array:
            return jnp.where(bad, jnp.full_like(leaf, jnp.nan), leaf)

        return {key: jax.tree.map(spoilt, grad) if key == smallest else grad for key, grad in grads.items()}

    @staticmethod
    def gradients_for_update(finite: jax.Array, grads: Gradients, opt_state: Any) -> dict[str, jax.Array | None]:
        """Replace gradients that are not finite by zeros, where a parameter has no state yet: its first must not be made of them.

        ``finite`` (bool scalar) is whether all gradients are.
        """

        def first(key: str, grad: jax.Array | None) -> jax.Array | None:
            if grad is None or (isinstance(opt_state, Mapping) and key in opt_state):
                return grad
            return jnp.where(finite, grad, jnp.zeros_like(grad))

        return {key: first(key, grad) for key, grad in grads.items()}

    @staticmethod
    def keep(finite: jax.Array, old: Any, new: Any) -> Any:
        """``new`` where ``finite`` (bool scalar), else ``old``; entries that only ``new`` has stay, or have another shape."""
        if isinstance(new, Mapping) and isinstance(old, Mapping):
            return {key: FiniteGuard.keep(finite, old[key], value) if key in old else value for key, value in new.items()}
        if jax.tree.structure(old) != jax.tree.structure(new):
            return new  # state that the optimizer has just made, from zeros
        return jax.tree.map(
            lambda before, after: jnp.where(finite, after, before) if jnp.shape(before) == jnp.shape(after) else after, old, new
        )
