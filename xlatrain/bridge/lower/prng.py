"""The random key of the step that is being lowered."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xlatrain.init.prng import INIT_PRNG, standard_normal

DRAWS_PER_KEY = 256
"""How many consecutive numbers of draws share a key in :class:`KeyPerOp`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyPerOp:
    """Keys for a graph that has one for each random op, in place of one for all: draws ``256 i … 256 i + 255`` use ``keys[i]``.

    Attributes:
        keys: uint32[ops, 2], raw.
    """

    keys: Any

    def draw_key(self, index: int) -> jax.Array:
        key = jax.random.wrap_key_data(self.keys[index // DRAWS_PER_KEY], impl=INIT_PRNG)
        number = index % DRAWS_PER_KEY
        # Nearly all ops draw once. The blocks of fold_in and those of an array's elements have nothing in common.
        return jax.random.fold_in(key, number) if number else key


_KEY: contextvars.ContextVar[jax.Array | KeyPerOp | None] = contextvars.ContextVar("xlatrain_step_key", default=None)


@contextlib.contextmanager
def use_key(key: jax.Array | KeyPerOp | None) -> Iterator[None]:
    """Within the block, lowerings of random ops derive their draws from ``key`` (a typed or a raw ``uint32[2]`` key, or one for
    each op)."""
    token = _KEY.set(key)
    try:
        yield
    finally:
        _KEY.reset(token)


def step_key() -> jax.Array:
    """The key of the step being lowered.

    Raises:
        RuntimeError: no key was given, although the captured graph draws random numbers.
    """
    key = _KEY.get()
    if key is None or isinstance(key, KeyPerOp):
        raise RuntimeError(
            "the captured graph draws random numbers, but its lowering was called without a key: "
            "pass key=jax.random.key(seed) to the lowered function"
        )
    return key


def draw_key(index: int) -> jax.Array:
    """The key of random draw number ``index`` of this step: independent of the order in which draws are lowered."""
    if isinstance(keys := _KEY.get(), KeyPerOp):
        return keys.draw_key(index)
    return jax.random.fold_in(step_key(), index)


def draw_normal(index: int, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Standard normal numbers, of draw number ``index``."""
    if dtype == jnp.float32 and isinstance(_KEY.get(), KeyPerOp):
        return standard_normal(draw_key(index), shape)
    return jax.random.normal(draw_key(index), shape, dtype)
