"""Optimizer updates (``xlatrain::update``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xlatrain.bridge.capture.updates import lower_update
from xlatrain.bridge.lower.registry import lowers


@lowers("xlatrain.update.default")
def update(params: Sequence[jax.Array], grads: Sequence[jax.Array], call: int, skip: jax.Array | None = None) -> list[Any]:
    return [*lower_update(params, grads, call, skip), jnp.zeros((), jnp.float32)]
