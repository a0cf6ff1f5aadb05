"""Optimizer updates (``xlatrain::update``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xlatrain.bridge.registry import lowers
from xlatrain.bridge.updates import lower_update


@lowers("xlatrain.update.default")
def update(params: Sequence[jax.Array], grads: Sequence[jax.Array], call: int, skip: jax.Array | None = None) -> list[Any]:
    return [*lower_update(params, grads, call, skip), jnp.zeros((), jnp.float32)]
