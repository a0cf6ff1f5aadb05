"""Sharding rules: which mesh axes split which dims of which parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlatrain.mesh import batch_axes


@dataclass(frozen=True)
class ShardingRules:
    """Maps a parameter's path and shape to a ``PartitionSpec``.

    The first glob of ``by_path`` that matches the path decides. Other parameters of at least ``min_size`` elements are
    split over the mesh's ``fsdp`` axis, if it has one, along their largest dim that it divides; the rest are replicated.

    Attributes:
        by_path: pairs of a glob over the parameter's dotted path (``"*.attn.*.weight"``) and its spec.
        min_size: elements below which a parameter stays replicated under the automatic rule.
    """

    by_path: tuple[tuple[str, PartitionSpec], ...] = ()
    min_size: int = 1024

    def spec(self, path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        """The spec of the parameter ``path``.

        Raises:
            ValueError: a glob's spec names an axis that the mesh lacks, or splits a dim that the axes do not divide.
        """
        for pattern, spec in self.by_path:
            if fnmatchcase(path, pattern):
                _check_spec(path, shape, pattern, spec, mesh)
                return spec
        return self._automatic(shape, mesh)

    def _automatic(self, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        size = mesh.shape.get("fsdp", 1)
        if size == 1 or math.prod(shape) < self.min_size:
            return PartitionSpec()
        divisible = [dim for dim, length in enumerate(shape) if length % size == 0]
        if not divisible:
            return PartitionSpec()
        split = max(divisible, key=lambda dim: shape[dim])
        return PartitionSpec(*(None,) * split, "fsdp")

    def shardings(self, tree: Mapping[str, Any], mesh: Mesh) -> dict[str, NamedSharding]:
        """One ``NamedSharding`` for each entry (anything with a ``shape``) of a dict keyed by parameter path."""
        return {path: NamedSharding(mesh, self.spec(path, tuple(leaf.shape), mesh)) for path, leaf in tree.items()}


def _check_spec(path: str, shape: tuple[int, ...], pattern: str, spec: PartitionSpec, mesh: Mesh) -> None:
    where = f"sharding rule {pattern!r} → {spec} for parameter {path!r} of shape {shape}"
    if len(spec) > len(shape):
        raise ValueError(f"{where}: the spec has {len(spec)} dims, the parameter {len(shape)}")
    for dim, axes in enumerate(spec):
        names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        unknown = [name for name in names if name not in mesh.shape]
        if unknown:
            raise ValueError(f"{where}: the mesh has no axis {unknown}; its axes are {dict(mesh.shape)}")
        parts = math.prod(mesh.shape[name] for name in names)
        if shape[dim] % parts:
            raise ValueError(f"{where}: dim {dim} of length {shape[dim]} is not divisible by {parts} (axes {names})")


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def split_batch(mesh: Mesh) -> NamedSharding:
    """Dim 0 split over the mesh's data axes."""
    return NamedSharding(mesh, PartitionSpec(batch_axes(mesh) or None))


def like_parameters(state: Any, params: Mapping[str, Any], shardings: Mapping[str, NamedSharding], mesh: Mesh) -> Any:
    """Shardings for per-parameter state (``{parameter path: any pytree}``): a leaf shaped like its parameter is split
    like it, every other leaf is replicated."""

    def of_parameter(path: str, sub: Any) -> Any:
        shape = tuple(params[path].shape)
        same = shardings[path]
        return jax.tree.map(lambda leaf: same if tuple(leaf.shape) == shape else replicated(mesh), sub)

    return {path: of_parameter(path, sub) for path, sub in state.items()}
