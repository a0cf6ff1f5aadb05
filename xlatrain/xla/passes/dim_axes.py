"""The mesh axes over which the dims of an array are split, as the passes over jaxprs follow them."""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

from jax.sharding import NamedSharding

from xlatrain.mesh.mesh import DATA_AXES

DimAxes: TypeAlias = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim."""


def split_of(sharding: NamedSharding, ndim: int) -> DimAxes:
    """The mesh axes of each dim of an array of ``ndim`` dims."""
    dims = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    return tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in dims)


def over_batch_axes(split: DimAxes | None) -> TypeGuard[DimAxes]:
    """Whether an axis that splits the batch is among them."""
    return split is not None and any(axis in DATA_AXES for axes in split for axis in axes)
