"""The program that makes an optimizer's first state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from torch_compat.step.optimizers.frozen_update import FrozenInit
from xlatrain.xla.stored_programs import StoredProgram, may_be_stored
from xlatrain.xla.told import told


def init_program(init: Callable[..., Any], shardings: Any, mesh: Mesh) -> Callable[..., Any]:
    """The program of ``init``, whose results get ``shardings``; for equal updates of ``torch.optim`` the same one, maybe on disk.

    Args:
        shardings: of the results, in their structure; None: where the parameters are.
    """
    leaves, structure = jax.tree.flatten(shardings)
    if not isinstance(init, FrozenInit):
        return _jitted(init, leaves, structure)
    return _kept(init, tuple(leaves), structure, may_be_stored(mesh))


@functools.lru_cache(maxsize=16)
def _kept(init: FrozenInit, leaves: tuple[Any, ...], structure: Any, stored: bool) -> Callable[..., Any]:
    program = _jitted(init, leaves, structure)
    return StoredProgram(program, lambda: told(("init", init, leaves, structure))) if stored else program


def _jitted(init: Callable[..., Any], leaves: Sequence[Any], structure: Any) -> Callable[..., Any]:
    options = {"out_shardings": jax.tree.unflatten(structure, leaves)} if leaves else {}
    return jax.jit(init, **options)  # without compiler_options: zeros
