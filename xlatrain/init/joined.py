"""Joined tensors: several stored tensors that are one parameter, stacked, or one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Readable(Protocol):
    """A tensor of which parts can be read: :class:`~xlatrain.init.safetensors.StoredTensor`, or a :class:`Joined`."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray: ...


@dataclass(frozen=True)
class Joined:
    """Stored tensors joined along one dim; a slice reads only the tensors that it touches.

    Attributes:
        parts: in order; of one dtype, and of one shape but for ``dim`` where they are concatenated.
        dim: along which.
        stacked: whether ``dim`` is a new one, of length ``len(parts)``.
        shape: of the whole.
    """

    parts: tuple[Readable, ...]
    dim: int
    stacked: bool
    shape: tuple[int, ...]

    @classmethod
    def stack(cls, parts: Sequence[Readable]) -> Joined:
        """Parts of equal shapes along a new dim 0.

        Raises:
            ValueError: they differ in shape or dtype.
        """
        if len({(part.shape, part.dtype) for part in parts}) != 1:
            raise ValueError(f"tensors to stack differ: {[(part.name, part.shape, str(part.dtype)) for part in parts]}")
        return cls(tuple(parts), 0, True, (len(parts), *parts[0].shape))

    @classmethod
    def concatenate(cls, parts: Sequence[Readable], dim: int) -> Joined:
        """Parts one behind the other along ``dim``.

        Raises:
            ValueError: they differ in another dim, or in dtype.
        """
        first = parts[0].shape
        dim = dim % len(first)
        if len({(part.shape[:dim], part.shape[dim + 1 :], part.dtype) for part in parts}) != 1:
            raise ValueError(f"tensors to concatenate differ: {[(part.name, part.shape, str(part.dtype)) for part in parts]}")
        return cls(tuple(parts), dim, False, (*first[:dim], sum(part.shape[dim] for part in parts), *first[dim + 1 :]))

    @property
    def name(self) -> str:
        return f"{self.parts[0].name} … {self.parts[-1].name}"

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The elements of ``index`` (a slice with step 1 for each leading dim), in memory of their own."""
        full = [*index, *(slice(None) for _ in self.shape[len(index) :])]
        bounds = [part.indices(length)[:2] for part, length in zip(full, self.shape, strict=True)]
        start, stop = bounds[self.dim]
        result = np.empty([last - first for first, last in bounds], self.dtype)
        at = 0
        for part in self.parts:
            length = 1 if self.stacked else part.shape[self.dim]
            first, last = max(start, at), min(stop, at + length)
            if first < last:
                inner = [slice(*bound) for bound in bounds]
                inner[self.dim] = slice(first - at, last - at)
                place = (*(slice(None) for _ in range(self.dim)), slice(first - start, last - start))
                values = part.read(tuple(inner[1:] if self.stacked else inner))
                result[place] = values[None] if self.stacked else values
            at += length
        return result
