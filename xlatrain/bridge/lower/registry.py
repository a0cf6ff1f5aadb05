"""The table of lowerings: which JAX function computes which ATen op; and whether several devices run the program."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from jax.sharding import Mesh

from xlatrain.bridge.capture.op_facts import resolve

_PARTITIONED: ContextVar[bool] = ContextVar("partitioned", default=False)
_MESH: ContextVar[Mesh | None] = ContextVar("program_mesh", default=None)


def is_partitioned() -> bool:
    """Whether the program is for several devices."""
    return _PARTITIONED.get()


def program_mesh() -> Mesh | None:
    """The devices that the program will run on; None if they are not known."""
    return _MESH.get()


@contextlib.contextmanager
def partitioned(value: bool, mesh: Mesh | None = None) -> Iterator[None]:
    """Set whether the program is for several devices, and which, while a graph is lowered in the block."""
    token, of_mesh = _PARTITIONED.set(value), _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(of_mesh)
        _PARTITIONED.reset(token)


Lowering = Callable[..., Any]
_F = TypeVar("_F", bound=Lowering)

_TABLE: dict[torch._ops.OpOverload, Lowering] = {}
_OURS: set[torch._ops.OpOverload] = set()


def lowers(*names: str) -> Callable[[_F], _F]:
    """Register the decorated function as the lowering of the ATen ops called ``names`` (``"aten.add.Tensor"``).

    The function receives the op's arguments as its schema has them, with tensors as ``jax.Array``; dtypes stay
    ``torch.dtype``. The result's dtype is cast to, and its shape checked against, what torch promised for the node.

    Raises:
        ValueError: an op is registered twice.
    """

    ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("xlatrain.")

    def register(fn: _F) -> _F:
        for name in names:
            op = resolve(name)
            if op is None:
                continue
            if op in _TABLE:
                raise ValueError(f"{name} has two lowerings: {_TABLE[op].__module__} and {fn.__module__}")
            _TABLE[op] = fn
            if ours:
                _OURS.add(op)
        return fn

    return register


def lowering_of(op: torch._ops.OpOverload) -> Lowering | None:
    """The lowering of ``op``, or None when there is none."""
    from xlatrain.bridge.lower import lowerings  # noqa: F401  registers every family on first use

    return _TABLE.get(op)


def is_ours(op: torch._ops.OpOverload) -> bool:
    """Whether ``op`` has a lowering that is part of this package."""
    return lowering_of(op) is not None and op in _OURS


def all_are_ours() -> bool:
    """Whether nobody has added a lowering: one that this package has is the same in another process."""
    return len(_OURS) == len(_TABLE)


def lowered_ops() -> frozenset[torch._ops.OpOverload]:
    """Every op that has a lowering."""
    from xlatrain.bridge.lower import lowerings  # noqa: F401

    return frozenset(_TABLE)
