"""JAX's 64-bit types: on for the runs that compute in float64, and for no others of the process.

JAX has one switch for a process. A run of a Trainer has it as it asks, and puts it back at its end. A Fabric has no end: the
switch stays on while one that computes in float64 lives, but for the Trainers' runs meanwhile. Who switched it on himself
(``JAX_ENABLE_X64=1``) has it on in every run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import jax

_runs: list[bool] = []  # that are under way, the innermost last: whether it computes in float64
_owners: weakref.WeakSet[Any] = weakref.WeakSet()  # that compute in float64 as long as they live
_own = False  # it is on, and was off before it was asked for here


@contextlib.contextmanager
def wide_types(wide: bool) -> Iterator[None]:
    """JAX has 64-bit types in the block if a run asks for them."""
    _runs.append(wide)
    _switch()
    try:
        yield
    finally:
        _runs.pop()
        _switch()


def keep_wide_types(owner: Any, wide: bool) -> None:
    """JAX has 64-bit types between runs, if ``owner`` asks for them, as long as it lives."""
    if wide:
        _owners.add(owner)
    _switch()


def _switch() -> None:
    global _own
    on = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    asked = _runs[-1] if _runs else bool(_owners)
    if asked and not on:
        jax.config.update("jax_enable_x64", True)
        _own = True
    elif _own and not asked:
        jax.config.update("jax_enable_x64", False)
        _own = False
