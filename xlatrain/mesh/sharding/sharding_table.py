"""The sharding table: where a training state lies on a mesh, in bytes per device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from xlatrain.mesh.mesh import DATA_AXES, SEQUENCE_AXIS, STAGE_AXIS, axes_over_slices
from xlatrain.mesh.sharding.rules import Choice, ShardingRules

_ROLES = ("parameter", "optimizer state", "buffer")


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of the state, or an optimizer's tensors of one parameter.

    Attributes:
        path: of the parameter or buffer.
        role: ``"parameter"``, ``"optimizer state"`` or ``"buffer"``.
        shape, dtype: of the whole tensor.
        spec: how it is split.
        bytes_whole: of one copy.
        bytes_per_device: that each device holds.
        rule: which rule decided, in words.
        reasons: why it is not split further.
    """

    path: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    bytes_whole: int
    bytes_per_device: int
    rule: str
    reasons: tuple[str, ...] = ()

    @property
    def copies(self) -> float:
        """The part of the whole that a device holds: 1 where the tensor is replicated."""
        return self.bytes_per_device / self.bytes_whole if self.bytes_whole else 1.0


@dataclass(frozen=True)
class ShardingTable:
    """Everything that a training state keeps on the devices of a mesh.

    Attributes:
        axes: the mesh's axis names and sizes.
        places: parameters, then optimizer state, then buffers.
        warnings: rules that match nothing, and axes that split nothing.
    """

    axes: dict[str, int]
    places: tuple[TensorPlace, ...]
    warnings: tuple[str, ...]

    @classmethod
    def from_rules(
        cls,
        rules: ShardingRules,
        mesh: Mesh,
        params: Mapping[str, Any],
        opt_state: Mapping[str, Any] | None = None,
        buffers: Mapping[str, Any] | None = None,
    ) -> ShardingTable:
        """The table of a state.

        Args:
            rules: which placed the parameters.
            params, buffers: path → array, or anything with ``shape`` and ``dtype``.
            opt_state: parameter path → pytree of such leaves. A leaf shaped like its parameter is split like it.
        """
        choices = {path: rules.choose(path, tuple(leaf.shape), mesh) for path, leaf in params.items()}
        places = [_place(path, "parameter", leaf, choices[path], mesh) for path, leaf in params.items()]
        for path, state in (opt_state or {}).items():
            if path in params and (leaves := jax.tree.leaves(state)):
                places.append(_optimizer_place(path, leaves, params[path], choices[path], mesh))
        whole = Choice(PartitionSpec(), "automatic", "", ("buffers are whole on every device",))
        places += [_place(path, "buffer", leaf, whole, mesh) for path, leaf in (buffers or {}).items()]
        idle = idle_axes((choice.spec for choice in choices.values()), mesh)
        warnings = [*rules.unmatched(params), *idle.values(), *slow_axes(mesh)]
        return cls({name: int(size) for name, size in mesh.shape.items()}, tuple(places), tuple(warnings))

    @property
    def devices(self) -> int:
        """Devices in the mesh."""
        return math.prod(self.axes.values())

    def bytes_per_device(self, role: str | None = None) -> int:
        """Bytes that each device holds, of one role or of all."""
        return sum(place.bytes_per_device for place in self.places if role in (None, place.role))

    def largest(self, count: int = 5) -> list[TensorPlace]:
        """The tensors that take most of a device, largest first."""
        return sorted(self.places, key=lambda place: -place.bytes_per_device)[:count]

    def __str__(self) -> str:
        lines = [f"mesh {' × '.join(f'{name}={size}' for name, size in self.axes.items())}: {self.devices} devices", ""]
        lines += _aligned([_HEADER, *(_row(place) for place in self.places if place.role != "optimizer state")])
        lines += ["", "bytes per device"]
        rows = [(role, self.bytes_per_device(role), self._whole(role)) for role in _ROLES]
        rows.append(("total", self.bytes_per_device(), self._whole(None)))
        lines += _aligned([(f"  {role}", human(each), f"of {human(whole)}") for role, each, whole in rows if whole])
        lines += ["", "largest on a device"]
        lines += _aligned([(f"  {p.path} ({p.role})", human(p.bytes_per_device), split_in_words(p.spec)) for p in self.largest()])
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON values."""
        return {
            "mesh": self.axes,
            "bytes_per_device": {role: self.bytes_per_device(role) for role in _ROLES} | {"total": self.bytes_per_device()},
            "tensors": [
                {
                    "path": place.path,
                    "role": place.role,
                    "shape": list(place.shape),
                    "dtype": place.dtype,
                    "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in place.spec],
                    "bytes": place.bytes_whole,
                    "bytes_per_device": place.bytes_per_device,
                    "rule": place.rule,
                    "reasons": list(place.reasons),
                }
                for place in self.places
            ],
            "warnings": list(self.warnings),
        }

    def _whole(self, role: str | None) -> int:
        return sum(place.bytes_whole for place in self.places if role in (None, place.role))


_HEADER = ("tensor", "shape", "dtype", "split over", "per device", "rule", "whole because")


def split_in_words(spec: PartitionSpec) -> str:
    """``"–, fsdp"``: by dim the axes that split it; ``"whole"`` if none does."""
    dims = ("–" if axes is None else axes if isinstance(axes, str) else "×".join(axes) for axes in spec)
    return ", ".join(dims) if any(spec) else "whole"


def _row(place: TensorPlace) -> tuple[str, ...]:
    shape = "×".join(map(str, place.shape)) or "scalar"
    why = "; ".join(place.reasons)
    return (place.path, shape, place.dtype, split_in_words(place.spec), human(place.bytes_per_device), place.rule, why)


def _place(path: str, role: str, leaf: Any, choice: Choice, mesh: Mesh) -> TensorPlace:
    size = _nbytes(leaf)
    dtype = np.dtype(leaf.dtype).name
    each = size // _parts(choice.spec, mesh)
    rule = str(choice) if role == "parameter" else role
    return TensorPlace(path, role, tuple(leaf.shape), dtype, choice.spec, size, each, rule, choice.reasons)


def _optimizer_place(path: str, leaves: list[Any], param: Any, choice: Choice, mesh: Mesh) -> TensorPlace:
    shape = tuple(param.shape)
    like = sum(_nbytes(leaf) for leaf in leaves if tuple(leaf.shape) == shape)
    other = sum(_nbytes(leaf) for leaf in leaves if tuple(leaf.shape) != shape)
    each = like // _parts(choice.spec, mesh) + other
    dtype = np.dtype(leaves[0].dtype).name
    reasons = (f"{human(other)} are not shaped like the parameter",) if other else ()
    return TensorPlace(path, "optimizer state", shape, dtype, choice.spec, like + other, each, "like its parameter", reasons)


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _parts(spec: PartitionSpec, mesh: Mesh) -> int:
    names = [name for axes in spec if axes is not None for name in ((axes,) if isinstance(axes, str) else axes)]
    return math.prod(mesh.shape[name] for name in names)


def idle_axes(specs: Iterable[PartitionSpec], mesh: Mesh) -> dict[str, str]:
    """Axes of several devices that split no parameter, though they would be there for it → that, in words."""
    used = {name for spec in specs for axes in spec if axes for name in ((axes,) if isinstance(axes, str) else axes)}
    return {
        name: f"mesh axis {name!r} of size {size} splits no parameter: each of its devices holds them all"
        f"{'' if name in DATA_AXES else ' and computes the same'}. Add a rule or a plan for it, or give its devices to 'data'"
        for name, size in mesh.shape.items()
        if name not in ("data", STAGE_AXIS, SEQUENCE_AXIS) and size > 1 and name not in used
    }


def slow_axes(mesh: Mesh) -> list[str]:
    """Axes other than ``data`` and ``stage`` that go over several TPU slices, in words."""
    return [
        f"mesh axis {name!r} of size {mesh.shape[name]} goes over several TPU slices: what it gathers and sums in every layer "
        "takes the data-center network, which bears little more than the sums of gradients over 'data', or what stages hand on. "
        "Let 'data' or 'stage' be the number of slices or a multiple, e.g. {'data': 2, 'fsdp': -1} for two"
        for name in axes_over_slices(mesh)
        if name not in ("data", STAGE_AXIS)
    ]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def human(size: int) -> str:
    """Bytes in decimal units."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"
