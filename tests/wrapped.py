"""Steps that a recording must refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Wrapped(Tensor):
    """A tensor subclass with a dispatch of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(self, inner: Tensor) -> None:
        self.wrapped = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        return func(*[one.wrapped if isinstance(one, Wrapped) else one for one in args], **(kwargs or {}))
