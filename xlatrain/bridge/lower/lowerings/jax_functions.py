"""JAX functions that torch called (:mod:`xlatrain.bridge.jax_function`)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from xlatrain.bridge.jax_function import plan_of
from xlatrain.bridge.jax_value import value_of
from xlatrain.bridge.lower.registry import lowers


@lowers("xlatrain.jax_call.default")
def jax_call(inputs: Sequence[jax.Array], plan: int) -> list[jax.Array]:
    return plan_of(plan).forward(inputs)


@lowers("xlatrain.jax_pullback.default")
def jax_pullback(residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array], plan: int) -> list[jax.Array]:
    return plan_of(plan).pullback(residuals, cotangents)


@lowers("xlatrain.jax_value.default")
def jax_value(size: Sequence[int], dtype: torch.dtype, program: str) -> jax.Array:
    return value_of(program).make()
