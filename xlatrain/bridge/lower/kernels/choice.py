"""Which kernel computes an attention op, and why: decided from shapes, dtypes and the mesh, before anything is computed."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from xlatrain.bridge.capture.masks.band import Band
from xlatrain.mesh.mesh import SEQUENCE_AXIS, batch_axes, data_parallel_size, platform, sequence_parts

SWITCH = "XLATRAIN_TPU_KERNELS"
_SHORTEST, _WIDEST = 128, 512


@dataclass(frozen=True)
class Request:
    """The request of an attention op.

    Attributes:
        queries, keys, values: shapes (…, H, L, E), (…, K, S, E), (…, K, S, V).
        dtype: of all three.
        mask: whether a mask decides what a query sees that is nothing simpler.
        segments: whether segments do.
        band: and which band.
        dropout: whether probabilities are dropped.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: Any
    mask: bool
    segments: bool
    band: Band
    dropout: bool

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and of keys."""
        return self.queries[-2], self.keys[-2]

    @property
    def rows(self) -> int:
        """The number of rows, whatever dims they have."""
        return math.prod(self.queries[:-3])

    def __str__(self) -> str:
        seen = ["a mask"] if self.mask else [str(self.band)] if self.segments is False or not self.band.is_whole else []
        parts = [*seen, *(["segments"] if self.segments else []), *(["dropout"] if self.dropout else [])]
        shape = ",".join(map(str, self.queries))
        keys = "" if self.queries[:-1] == self.keys[:-1] else f" × [{','.join(map(str, self.keys))}]"
        return f"attention {np.dtype(self.dtype).name}[{shape}]{keys}, {' and '.join(parts)}"


@dataclass(frozen=True)
class OwnPart:
    """Attention on every device of a mesh for its own rows, heads and queries.

    Attributes:
        mesh: None: one device.
        rows: the mesh axes that split rows.
        heads: the mesh axis that splits heads; None if they stay together.
        repeated: how often keys and values are repeated, so that every device has those of its queries.
        parts: into so many the sequence axis splits queries; each device gathers all keys and values of its rows and heads.
        why: in words.
    """

    mesh: Mesh | None
    rows: tuple[str, ...]
    heads: str | None
    repeated: int
    parts: int
    why: str


@dataclass(frozen=True)
class Splash(OwnPart):
    """The TPU kernels.

    Attributes:
        interpret: computed by XLA.
        balanced: a device takes queries from the front of the sequence, and as many from its end, so that all see as many keys.
    """

    interpret: bool
    balanced: bool = False

    def __str__(self) -> str:
        return f"TPU kernel (splash): {self.why}"


@dataclass(frozen=True)
class Gathered(OwnPart):
    """XLA's own products and softmax, of keys and values that are gathered over the sequence axis."""

    def __str__(self) -> str:
        return f"XLA: {self.why}"


@dataclass(frozen=True)
class Xla:
    """XLA's own products and softmax.

    Attributes:
        why: no kernel.
    """

    why: str

    def __str__(self) -> str:
        return f"XLA: {self.why}"


def choose(request: Request, mesh: Mesh | None) -> Splash | Gathered | Xla:
    """The TPU kernels where they compute the same, else XLA: on a mesh that splits sequences, where it can, of gathered keys.

    Raises:
        ValueError: the environment variable ``XLATRAIN_TPU_KERNELS`` has a value that it cannot have.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1", "interpret"):
        raise ValueError(f"{SWITCH}={switch!r}: expected 1 (the default), 0 (no TPU kernel) or interpret (for tests)")
    choice = _kernel(request, mesh, switch)
    if mesh is None or sequence_parts(mesh) == 1 or isinstance(choice, Splash):
        return choice
    return _gathered(request, mesh, choice.why)


def _kernel(request: Request, mesh: Mesh | None, switch: str) -> Splash | Xla:
    if switch == "0":
        return Xla(f"{SWITCH}=0")
    if mesh is None or (platform(mesh) != "tpu" and switch != "interpret"):
        return Xla("no TPU")
    reason = _refusal(request) or _uneven(request, sequence_parts(mesh))
    return Xla(reason) if reason else _on_mesh(request, mesh, interpret=switch == "interpret")


def _gathered(request: Request, mesh: Mesh, why: str) -> Gathered | Xla:
    """XLA on each device's own queries, unless a mask or draws would have to be split like them."""
    if request.mask or request.dropout:
        return Xla(f"{why}; split as the partitioner likes")
    split = _split(request, mesh)
    return Xla(f"{why}; {split}") if isinstance(split, str) else Gathered(*split[:-1], f"{why}; {split[-1]}")


def _uneven(request: Request, parts: int) -> str:
    """Why a part of a sequence is nothing for the kernel, which fills up whole sequences only; empty if it is."""
    queries, keys = request.lengths
    if parts > 1 and (queries % (parts * _SHORTEST) or keys % _SHORTEST):
        return f"{queries} queries and {keys} keys over {SEQUENCE_AXIS}: the kernel takes multiples of {_SHORTEST} on each device"
    return ""


def _refusal(request: Request) -> str:
    """Why the kernels cannot compute it; empty if they can."""
    queries, keys = request.queries[-2], request.keys[-2]
    if request.dropout:
        return "dropout, whose draws are the same on any device and in any blocks"
    if request.mask:
        return "a mask that is neither causal, a window, segments nor padding"
    if request.dtype not in (jnp.bfloat16, jnp.float32):
        return f"{np.dtype(request.dtype).name}, which TPUs do not multiply"
    if min(queries, keys) < _SHORTEST:
        return f"{queries} queries and {keys} keys: the kernel begins at {_SHORTEST}"
    if max(request.queries[-1], request.values[-1]) > _WIDEST:
        return f"{max(request.queries[-1], request.values[-1])} features a head: the kernel ends at {_WIDEST}"
    if not request.band.sees_some(queries, keys):
        return "queries that see no key"
    return ""


def _on_mesh(request: Request, mesh: Mesh, *, interpret: bool) -> Splash | Xla:
    if mesh.size == 1:
        return Splash(None, (), None, 1, 1, "one device", interpret)
    split = _split(request, mesh)
    if isinstance(split, str):
        return Xla(split)
    parts, why = split[-2], split[-1]
    balanced = parts > 1 and request.band.left is None and request.band.right is not None
    if balanced and request.queries[-2] % (2 * parts * _SHORTEST):
        balanced, why = False, f"{why}, later parts of which see more keys"
    return Splash(*split[:-1], why, interpret, balanced)


def _split(request: Request, mesh: Mesh) -> tuple[Mesh, tuple[str, ...], str | None, int, int, str] | str:
    """The fields of :class:`OwnPart` for a mesh; or why a request does not divide over it."""
    heads, key_heads = request.queries[-3], request.keys[-3]
    rows, tensor, parts = data_parallel_size(mesh), dict(mesh.shape).get("tensor", 1), sequence_parts(mesh)
    if request.rows % rows:
        return f"{request.rows} rows do not divide over the mesh's {rows} parts of a batch"
    if heads % tensor:
        return f"{heads} heads do not divide over the tensor axis of {tensor}"
    repeated = tensor // math.gcd(key_heads, tensor)
    if heads % (key_heads * repeated):
        return f"{heads} heads of queries and {key_heads} of keys do not divide over the tensor axis of {tensor}"
    if any(length % parts for length in request.lengths):
        return (
            f"{request.lengths[0]} queries and {request.lengths[1]} keys do not divide over the {SEQUENCE_AXIS} axis of {parts}"
        )
    split = [f"rows over {' and '.join(batch_axes(mesh))}"] if rows > 1 else []
    split += ["heads over tensor"] if tensor > 1 else []
    split += [f"keys repeated {repeated} times"] if repeated > 1 else []
    split += [f"queries over {SEQUENCE_AXIS}"] if parts > 1 else []
    axis = "tensor" if tensor > 1 else None
    axes = batch_axes(mesh) if rows > 1 else ()
    return mesh, axes, axis, repeated, parts, ", ".join(split) or "whole on each device"
