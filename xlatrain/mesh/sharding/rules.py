"""Sharding rules: which mesh axes split which dims of which parameter, and why.

And the shardings of everything but parameters: batches, scalars, optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import AXES, EXPERT_AXIS, STAGE_AXIS


@dataclass(frozen=True)
class PlannedSplit:
    """The part of a tensor-parallel plan about one parameter.

    Attributes:
        dim: which dim the ``tensor`` axis splits; None: none.
        source: what the table calls it.
        fsdp: whether ``fsdp`` splits another dim.
        expert: which dim the ``expert`` axis splits; None: none.
    """

    dim: int | None
    source: str
    fsdp: bool = True
    expert: int | None = None


@dataclass(frozen=True)
class Choice:
    """The choice of a parameter's split.

    Attributes:
        spec: mesh axes by dim.
        kind: which sort of rule decided: ``"path"``, ``"logical"``, ``"plan"`` or ``"automatic"``.
        pattern: that rule; empty for the automatic one.
        reasons: why it is not split further, one sentence per axis.
    """

    spec: PartitionSpec
    kind: Literal["path", "logical", "plan", "automatic"]
    pattern: str = ""
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.pattern}" if self.pattern else self.kind


@dataclass(frozen=True)
class ShardingRules:
    """Maps a parameter's path and shape to a ``PartitionSpec``.

    In this order, the first that matches a parameter decides:

    1. ``by_path``: the first glob that matches the path. The spec is taken as it is.
    2. ``logical_axes``: the first glob that matches gives the parameter's dims names, and ``axis_rules`` gives these names
       mesh axes (as ``flax.linen.logical_to_mesh_axes``). A name without a rule is not split.
    3. ``planned``: a plan says which dims ``tensor`` and ``expert`` split; ``fsdp`` and ``stage`` then split others, as in 4.
    4. automatic: a parameter of at least ``min_size`` elements is split over ``fsdp``, if the mesh has it, along its largest dim
       that the axis divides; then over ``stage``. (Stacked layers are split over ``stage`` by layers instead, whatever decided.)

    A dim that its axes do not divide is an error under ``by_path`` and ``logical_axes``, or stays whole with
    ``indivisible="replicate"``; plans and the automatic rule leave it whole. Nothing is padded.

    Attributes:
        by_path: pairs of a glob over the parameter's dotted path (``"*.attn.*.weight"``) and its spec.
        min_size: elements below which a parameter is not split over ``fsdp`` and ``stage`` by 3 and 4.
        logical_axes: pairs of a glob and a name, or None, for each dim.
        axis_rules: logical name → mesh axis, axes, or None.
        planned: by parameter path; see :mod:`xlatrain.bridge.tensor_parallel`, which makes them of a module.
        indivisible: what becomes of such a dim under 1 and 2.
        offload: ``"optimizer"``: the optimizer's state lies in host memory (:mod:`xlatrain.step.offload`).
        rounds, microbatches: of the pipeline over ``stage``, see :class:`~xlatrain.mesh.pipelining.Pipelining`.

    Raises:
        ValueError: a rule names an axis that no mesh has, or a logical name is not in ``axis_rules``.
    """

    by_path: tuple[tuple[str, PartitionSpec], ...] = ()
    min_size: int = 1024
    logical_axes: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    axis_rules: Mapping[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    planned: Mapping[str, PlannedSplit] = field(default_factory=dict)
    indivisible: Literal["error", "replicate"] = "error"
    offload: Literal["optimizer"] | None = None
    rounds: int = 1
    microbatches: int | None = None

    def __post_init__(self) -> None:
        if self.indivisible not in ("error", "replicate"):
            raise ValueError(f"indivisible={self.indivisible!r}; expected 'error' or 'replicate'")
        if self.offload not in (None, "optimizer"):
            raise ValueError(
                f"offload={self.offload!r}; expected 'optimizer' (its state in host memory) or None. For activations name "
                "modules: offload_activations=['…layers.*']; parameters and gradients are split over more devices instead"
            )
        if not isinstance(self.min_size, int) or self.min_size < 0:
            raise ValueError(f"min_size={self.min_size!r}; expected a number of elements, 0 or more")
        object.__setattr__(self, "by_path", tuple((pattern, _as_spec(pattern, spec)) for pattern, spec in self.by_path))
        for name, axes in self.axis_rules.items():
            _check_axes(f"axis rule {name!r} → {axes!r}", (axes,))
        for pattern, names in self.logical_axes:
            if isinstance(names, str):
                raise ValueError(f"logical axes {pattern!r} → {names!r}: expected a name, or None, for each dim: ({names!r}, …)")
            if unknown := [name for name in names if name is not None and name not in self.axis_rules]:
                raise ValueError(
                    f"logical axes {pattern!r} → {names}: no axis rule for {unknown}; axis_rules has {sorted(self.axis_rules)}. "
                    "Add them there (None: not split)"
                )
            axes = [None if name is None else self.axis_rules[name] for name in names]
            _check_once(f"logical axes {pattern!r} → {names}, by axis_rules {axes}", axes)

    def spec(self, path: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        """The spec of the parameter ``path``; see :meth:`choose`."""
        return self.choose(path, shape, mesh).spec

    def choose(self, path: str, shape: tuple[int, ...], mesh: Mesh) -> Choice:
        """The spec of the parameter ``path``, and why.

        Raises:
            ValueError: a spec names an axis that the mesh lacks, has more dims than the parameter, or splits a dim that the axes
                do not divide.
        """
        for pattern, spec in self.by_path:
            if fnmatchcase(path, pattern):
                where = f"sharding rule {pattern!r} → {spec} for parameter {path!r} of shape {shape}"
                return self._asked(where, spec, shape, mesh, "path", pattern)
        for pattern, names in self.logical_axes:
            if fnmatchcase(path, pattern):
                where = f"logical axes {pattern!r} → {names} for parameter {path!r} of shape {shape}"
                axes = [None if name is None else self.axis_rules[name] for name in names]
                present = [_present(axis, mesh) for axis in axes]
                return self._asked(where, PartitionSpec(*present), shape, mesh, "logical", pattern)
        if (entry := self.planned.get(path)) is not None:
            return self._planned(entry, shape, mesh)
        split, reasons = self._over("fsdp", [None] * len(shape), shape, mesh)
        split, more = self._over(STAGE_AXIS, split, shape, mesh)
        reasons += more
        if mesh.shape.get("tensor", 1) > 1:
            reasons.append("whole over tensor: no rule or plan names it")
        return Choice(_spec(split), "automatic", "", tuple(reasons))

    def _asked(self, where: str, spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh, kind: Any, pattern: str) -> Choice:
        if len(spec) > len(shape):
            raise ValueError(f"{where}: the spec has {len(spec)} dims, the parameter {len(shape)}")
        split, reasons = list(spec), []
        for dim, axes in enumerate(spec):
            names = axis_names(axes)
            if unknown := [name for name in names if name not in mesh.shape]:
                raise ValueError(
                    f"{where}: the mesh has no axis {unknown}; its axes are {dict(mesh.shape)}. Give the mesh that axis "
                    "(of size 1 if need be), or name dims by logical_axes, where axes that the mesh lacks are left out"
                )
            parts = math.prod(mesh.shape[name] for name in names)
            if shape[dim] % parts == 0:
                continue
            problem = f"dim {dim} of length {shape[dim]} is not divisible by {parts} (axes {names})"
            if self.indivisible == "error":
                raise ValueError(f"{where}: {problem}; change the rule, or leave such dims whole with indivisible='replicate'")
            split[dim] = None
            reasons.append(f"whole over {'×'.join(names)}: {problem}")
        return Choice(PartitionSpec(*split) if reasons else spec, kind, pattern, tuple(reasons))

    def _planned(self, entry: PlannedSplit, shape: tuple[int, ...], mesh: Mesh) -> Choice:
        split: list[Any] = [None] * len(shape)
        reasons = []
        size = mesh.shape.get("tensor", 1)
        if size > 1 and entry.dim is None:
            reasons.append(f"whole over tensor: the plan says so ({entry.source})")
        elif size > 1 and entry.dim is not None:
            length = shape[entry.dim]
            if length % size:
                reasons.append(f"whole over tensor: dim {entry.dim % len(shape)} of length {length} is not divisible by {size}")
            else:
                split[entry.dim] = "tensor"
        if entry.expert is not None and mesh.shape.get(EXPERT_AXIS, 1) > 1:
            split[entry.expert] = EXPERT_AXIS
        if entry.fsdp:
            split, more = self._over("fsdp", split, shape, mesh)
            reasons += more
        elif mesh.shape.get("fsdp", 1) > 1:
            reasons.append(f"whole over fsdp: the plan says so ({entry.source})")
        split, more = self._over(STAGE_AXIS, split, shape, mesh)
        reasons += more
        return Choice(_spec(split), "plan", entry.source, tuple(reasons))

    def _over(self, axis: str, split: list[Any], shape: tuple[int, ...], mesh: Mesh) -> tuple[list[Any], list[str]]:
        """``split`` with the largest of its whole dims over an axis, or why not."""
        size = mesh.shape.get(axis, 1)
        if size == 1:
            return split, []
        if math.prod(shape) < self.min_size:
            return split, [f"whole over {axis}: {math.prod(shape)} elements, fewer than min_size={self.min_size}"]
        divisible = [dim for dim, length in enumerate(shape) if split[dim] is None and length % size == 0]
        if not divisible:
            free = "other dim" if any(split) else "dim"
            return split, [f"whole over {axis}: no {free} of {shape} is divisible by {size}"]
        largest = max(divisible, key=lambda dim: shape[dim])
        return [*split[:largest], axis, *split[largest + 1 :]], []

    def shardings(self, tree: Mapping[str, Any], mesh: Mesh) -> dict[str, NamedSharding]:
        """The ``NamedSharding`` of each entry (anything with a ``shape``) of a dict keyed by parameter path."""
        return {path: NamedSharding(mesh, self.spec(path, tuple(leaf.shape), mesh)) for path, leaf in tree.items()}

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """The rules that decide about no parameter, in words: they match none, or earlier rules match the same parameters."""
        paths = list(paths)
        left = set(paths)
        found = []
        for kind, pairs in (("sharding rule", self.by_path), ("logical axes", self.logical_axes)):
            for pattern, value in pairs:
                matching = {path for path in paths if fnmatchcase(path, pattern)}
                if not matching:
                    found.append(f"{kind} {pattern!r} → {value} matches no parameter")
                elif not matching & left:
                    found.append(f"{kind} {pattern!r} → {value} decides nothing: rules before it match the same parameters")
                left -= matching
        return found


def pairs_of(argument: str, pairs: Any) -> tuple[tuple[str, Any], ...]:
    """Pairs of a glob and its value, given as they are or as a dict.

    Raises:
        ValueError: something else; it names ``argument``.
    """
    pairs = list(pairs.items()) if isinstance(pairs, Mapping) else list(pairs)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(f"{argument}: {pair!r} is not a pair of a glob and its value; expected [('*.weight', …)] or a dict")
    return tuple((pattern, value) for pattern, value in pairs)


def _as_spec(pattern: str, spec: Any) -> PartitionSpec:
    if not isinstance(spec, PartitionSpec | tuple | list):
        raise ValueError(f"sharding rule {pattern!r} → {spec!r}: expected a PartitionSpec, e.g. PartitionSpec(None, 'fsdp')")
    where = f"sharding rule {pattern!r} → {spec}"
    _check_axes(where, spec)
    _check_once(where, spec)
    return PartitionSpec(*spec)


def _check_axes(where: str, dims: Iterable[Any]) -> None:
    if unknown := [name for axes in dims for name in axis_names(axes) if name not in AXES]:
        raise ValueError(f"{where}: unknown mesh axis {unknown}; known axes: {', '.join(AXES)}")


def axis_names(axes: Any) -> tuple[str, ...]:
    """The mesh axes of one dim, as a ``PartitionSpec`` has them: None, a name or several."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _check_once(where: str, spec: Iterable[Any]) -> None:
    names = [name for axes in spec for name in axis_names(axes)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{where}: {', '.join(map(repr, twice))} stands there twice; an axis splits one dim")


def _present(axes: Any, mesh: Mesh) -> Any:
    """Drop the axes of a logical name that the mesh lacks: the same rules serve meshes with and without ``tensor``."""
    kept = tuple(name for name in axis_names(axes) if name in mesh.shape)
    return None if not kept else kept[0] if len(kept) == 1 else kept


def _spec(split: list[Any]) -> PartitionSpec:
    while split and split[-1] is None:
        split = split[:-1]
    return PartitionSpec(*split)


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def like_parameters(state: Any, params: Mapping[str, Any], shardings: Mapping[str, NamedSharding], mesh: Mesh) -> Any:
    """Shardings for per-parameter state (``{parameter path: any pytree}``): a leaf shaped like its parameter is split
    like it, every other leaf is replicated."""

    def of_parameter(path: str, sub: Any) -> Any:
        shape = tuple(params[path].shape)
        same = shardings[path]
        return jax.tree.map(lambda leaf: same if tuple(leaf.shape) == shape else replicated(mesh), sub)

    return {path: of_parameter(path, sub) for path, sub in state.items()}


def literal(name: str) -> str:
    """A glob that matches just this name."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
