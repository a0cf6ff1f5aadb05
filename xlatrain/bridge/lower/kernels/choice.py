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
from xlatrain.mesh.mesh import batch_axes, data_parallel_size, platform

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
class Splash:
    """The TPU kernels, on every device of a mesh for its own rows and heads.

    Attributes:
        mesh: None: one device.
        rows: the mesh axes that split rows.
        heads: the mesh axis that splits heads; None if they stay together.
        repeated: how often keys and values are repeated, so that every device has those of its queries.
        interpret: computed by XLA.
        why: in words.
    """

    mesh: Mesh | None
    rows: tuple[str, ...]
    heads: str | None
    repeated: int
    interpret: bool
    why: str

    def __str__(self) -> str:
        return f"TPU kernel (splash): {self.why}"


@dataclass(frozen=True)
class Xla:
    """XLA's own products and softmax.

    Attributes:
        why: no kernel.
    """

    why: str

    def __str__(self) -> str:
        return f"XLA: {self.why}"


def choose(request: Request, mesh: Mesh | None) -> Splash | Xla:
    """The TPU kernels where they compute the same, else XLA.

    Raises:
        ValueError: the environment variable ``XLATRAIN_TPU_KERNELS`` has a value that it cannot have.
    """
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1", "interpret"):
        raise ValueError(f"{SWITCH}={switch!r}: expected 1 (the default), 0 (no TPU kernel) or interpret (for tests)")
    if switch == "0":
        return Xla(f"{SWITCH}=0")
    if mesh is None or (platform(mesh) != "tpu" and switch != "interpret"):
        return Xla("no TPU")
    if reason := _refusal(request):
        return Xla(reason)
    return _on_mesh(request, mesh, interpret=switch == "interpret")


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
    heads, key_heads = request.queries[-3], request.keys[-3]
    if mesh.size == 1:
        return Splash(None, (), None, 1, interpret, "one device")
    parts, tensor = data_parallel_size(mesh), dict(mesh.shape).get("tensor", 1)
    if request.rows % parts:
        return Xla(f"{request.rows} rows do not divide over the mesh's {parts} parts of a batch")
    if heads % tensor:
        return Xla(f"{heads} heads do not divide over the tensor axis of {tensor}")
    repeated = tensor // math.gcd(key_heads, tensor)
    if heads % (key_heads * repeated):
        return Xla(f"{heads} heads of queries and {key_heads} of keys do not divide over the tensor axis of {tensor}")
    split = [f"rows over {' and '.join(batch_axes(mesh))}"] if parts > 1 else []
    split += ["heads over tensor"] if tensor > 1 else []
    split += [f"keys repeated {repeated} times"] if repeated > 1 else []
    axis = "tensor" if tensor > 1 else None
    return Splash(
        mesh, batch_axes(mesh) if parts > 1 else (), axis, repeated, interpret, ", ".join(split) or "whole on each device"
    )
