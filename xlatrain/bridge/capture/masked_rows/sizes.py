"""The shape of :class:`MaskedRows`: the rows are taken out where somebody asks how many there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows


class Sizes(tuple[Any, ...]):
    """A shape; Python sees ``int`` s, functions of C an object that can tell one."""

    _rows: MaskedRows

    def __new__(cls, rows: MaskedRows) -> Sizes:
        made = super().__new__(cls, (_Count(rows) if dim == rows.axis else size for dim, size in enumerate(rows.rows.shape)))
        made._rows = rows
        return made

    def _whole(self) -> torch.Size:
        return self._rows.exact().shape

    def __getitem__(self, index: Any) -> Any:
        known = range(len(self))[index]
        asked = (known,) if isinstance(known, int) else known
        return self._whole()[index] if self._rows.axis in asked else super().__getitem__(index)

    def __iter__(self) -> Iterator[int]:
        return iter(self._whole())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and len(self) == len(other) and self._whole() == tuple(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._whole())

    def __add__(self, other: Any) -> Any:
        return self._whole() + other

    def __radd__(self, other: Any) -> Any:
        return other + self._whole()

    def __contains__(self, size: object) -> bool:
        return size in self._whole()

    def __repr__(self) -> str:
        return repr(self._whole())

    def count(self, value: Any) -> int:
        return self._whole().count(value)

    def index(self, value: Any, *between: Any) -> int:
        return self._whole().index(value, *between)

    def numel(self) -> int:
        return self._whole().numel()


class _Count:
    def __init__(self, rows: MaskedRows) -> None:
        self._rows = rows

    def __index__(self) -> int:
        return self._rows.exact().shape[self._rows.axis]
