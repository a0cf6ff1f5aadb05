"""The training state: everything that a compiled step reads and replaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from xlatrain.step.loss_scale import LossScaleState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A pytree of arrays on the mesh, keyed by parameter path. It is donated to each step: keep no reference across one.

    Attributes:
        params: parameter path → array.
        buffers: buffer path → array (BatchNorm's running statistics, …).
        opt_state: the optimizer's state, one pytree per optimizer.
        accumulated: parameter path → summed gradient of the current accumulation window; ``{}`` without accumulation.
        draws: int32 scalar, how many steps have drawn from ``key``.
        key: uint32[2], raw PRNG key data from which each step's key is derived.
        loss_scale: state of dynamic loss scaling; ``()`` without.
    """

    params: dict[str, jax.Array]
    buffers: dict[str, jax.Array]
    opt_state: Any
    accumulated: dict[str, jax.Array]
    draws: jax.Array
    key: jax.Array
    loss_scale: LossScaleState | tuple[()] = ()


def step_key(state: TrainState) -> jax.Array:
    """The PRNG key of the step that is about to run: from the seed and the number of steps that drew, not the mesh."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.draws)
