"""Dynamic loss scaling for float16, with the semantics of ``torch.amp.GradScaler``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")


class LossScaleState(NamedTuple):
    """The state that loss scaling carries from step to step: part of the training state."""

    scale: jax.Array
    """float32 scalar, what the loss is multiplied by."""
    growth_tracker: jax.Array
    """int32 scalar, steps with finite gradients since the scale last changed."""


@dataclass(frozen=True)
class LossScaler:
    """Scales the loss up so that float16 gradients do not vanish; skips steps whose gradients overflowed.

    In a program: ``scale`` the loss, take gradients, ``unscale`` them, update, ``keep_if`` the gradients were not finite,
    ``update``. All but :meth:`state_dict` are pure. Reference: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling.

    Attributes:
        init_scale: the first scale.
        growth_factor: multiplies the scale after ``growth_interval`` steps in a row with finite gradients; more than 1.
        backoff_factor: multiplies the scale after a step with a gradient that is not finite; less than 1.
        growth_interval: steps with finite gradients before the scale grows.

    Raises:
        ValueError: a factor on the wrong side of 1.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if self.growth_factor <= 1.0:
            raise ValueError(f"growth_factor is {self.growth_factor}, expected more than 1.0")
        if self.backoff_factor >= 1.0:
            raise ValueError(f"backoff_factor is {self.backoff_factor}, expected less than 1.0")

    def init(self) -> LossScaleState:
        """The state before the first step."""
        return LossScaleState(jnp.asarray(self.init_scale, jnp.float32), jnp.zeros((), jnp.int32))

    def scale(self, loss: jax.Array, state: LossScaleState) -> jax.Array:
        """The loss to differentiate, a scalar of at least float32 (torch multiplies a float16 loss by a float32 scale)."""
        return loss * state.scale

    def unscale(self, grads: Tree, state: LossScaleState) -> tuple[Tree, jax.Array]:
        """The gradients of the loss itself, and whether one of them is not finite (bool scalar). None leaves stay None.

        Raises:
            ValueError: float16 gradients, which would be unscaled into underflow: keep the parameters in float32.
        """

        def unscaled(path: tuple[object, ...], grad: jax.Array) -> jax.Array:
            if grad.dtype == jnp.float16:
                raise ValueError(
                    f"gradient {jax.tree_util.keystr(path)} is float16 and cannot be unscaled without underflow; "
                    "keep the parameters in float32 (precision='16-mixed')"
                )
            return grad * (1 / state.scale).astype(grad.real.dtype)

        leaves = jax.tree.leaves(grads)
        finite = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]).all() if leaves else jnp.asarray(True)
        return jax.tree_util.tree_map_with_path(unscaled, grads), ~finite

    @staticmethod
    def keep_if(found_inf: jax.Array, old: Tree, new: Tree) -> Tree:
        """``old`` where ``found_inf`` (bool scalar), else ``new``: how a step is skipped. Both have the same structure."""
        return jax.tree.map(lambda before, after: jnp.where(found_inf, before, after), old, new)

    def update(self, state: LossScaleState, found_inf: jax.Array) -> LossScaleState:
        """The state after a step: backs off where ``found_inf``, grows after ``growth_interval`` steps without.

        The scale does not grow where it would become infinite.
        """
        clean_steps = state.growth_tracker + 1
        is_due = clean_steps == self.growth_interval
        grown = state.scale * self.growth_factor
        clean_scale = jnp.where(is_due & jnp.isfinite(grown), grown, state.scale)
        return LossScaleState(
            jnp.where(found_inf, state.scale * self.backoff_factor, clean_scale),
            jnp.where(found_inf | is_due, 0, clean_steps),
        )

    def state_dict(self, state: LossScaleState) -> dict[str, Any]:
        """The state in the format of ``torch.amp.GradScaler.state_dict()``; ``GradScaler.load_state_dict`` accepts it."""
        return {
            "scale": float(state.scale),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(state.growth_tracker),
        }

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> tuple[LossScaler, LossScaleState]:
        """A scaler and its state from what ``torch.amp.GradScaler.state_dict()`` or :meth:`state_dict` gave.

        Raises:
            ValueError: an empty dict, which is what a disabled ``GradScaler`` saves, or one that lacks an entry.
        """
        missing = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} - set(saved)
        if missing:
            raise ValueError(
                f"the loss scaler's state_dict lacks {sorted(missing)} (it has {sorted(saved)}); a GradScaler with "
                "enabled=False saves an empty one, start from LossScaler().init() instead"
            )
        scaler = cls(float(saved["scale"]), saved["growth_factor"], saved["backoff_factor"], int(saved["growth_interval"]))
        tracker = jnp.asarray(np.int32(saved["_growth_tracker"]))
        return scaler, LossScaleState(jnp.asarray(saved["scale"], jnp.float32), tracker)
