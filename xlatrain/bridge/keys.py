"""The random key of the step that is being lowered."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_KEY: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("xlatrain_step_key", default=None)


@contextlib.contextmanager
def use_key(key: jax.Array | None) -> Iterator[None]:
    """Within the block, lowerings of random ops derive their draws from ``key`` (a typed or a raw ``uint32[2]`` key)."""
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
    if key is None:
        raise RuntimeError(
            "the captured graph draws random numbers, but its lowering was called without a key: "
            "pass key=jax.random.key(seed) to the lowered function"
        )
    return key


def draw_key(index: int) -> jax.Array:
    """The key of random draw number ``index`` of this step: independent of the order in which draws are lowered."""
    return jax.random.fold_in(step_key(), index)
