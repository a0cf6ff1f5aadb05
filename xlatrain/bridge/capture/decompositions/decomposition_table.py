"""The table of ATen ops that PyTorch decomposes while it captures, so that fewer and simpler ones have to be lowered."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from xlatrain.bridge.capture.decompositions.embedding_bag import embedding_bag_decompositions
from xlatrain.bridge.capture.decompositions.foreach import foreach_decompositions
from xlatrain.bridge.capture.decompositions.grouped_matmul import grouped_matmul_decompositions
from xlatrain.bridge.capture.decompositions.least_squares import least_squares_decompositions
from xlatrain.bridge.capture.decompositions.linalg import linalg_decompositions
from xlatrain.bridge.capture.decompositions.random import random_decompositions
from xlatrain.bridge.capture.decompositions.strided import strided_decompositions
from xlatrain.bridge.patches import patched

aten = torch.ops.aten

# Decompositions that torch has but does not count as core.
_BEYOND_CORE = (
    "native_batch_norm",
    "native_batch_norm_backward",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_batch_norm_no_update",
    "batch_norm_backward",
    "embedding_dense_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "rrelu_with_noise_backward",
)

# Ops of the core table that are lowered as they are: the direct JAX form is shorter, faster or more exact.
_LOWERED_AS_THEY_ARE = (
    "t",
    "transpose",
    "_unsafe_view",
    "_safe_softmax",
    "multilabel_margin_loss_forward",  # torch 2.13's decomposition counts the labels after the end of a row's list
    "index_add",  # torch decomposes these to index_put, which counts negative indices from the end
    "index_copy",
    "index_fill",
    "native_layer_norm_backward",
    "native_group_norm_backward",
    *(
        f"{kind}_pad{dims}d{suffix}"
        for kind in ("reflection", "replication")
        for dims in (1, 2, 3)
        for suffix in ("", "_backward")
    ),
    *(f"{kind}{dims}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)),
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "_upsample_lanczos2d_aa",
)


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    """Every overload of ``aten.<name>``; none where this torch does not have the op."""
    packet = getattr(aten, name, None)
    return [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


@contextlib.contextmanager
def _finding_composites_once() -> Iterator[None]:
    """Within the block torch asks once for the composites of all namespaces, not for each of 29."""
    from torch._export import utils  # a process that finds its graphs on disk needs neither

    find = functools.cache(utils._materialize_cpp_cia_ops)
    with patched([(utils, "_materialize_cpp_cia_ops", find)]):
        yield


@functools.cache
def _table() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    with _finding_composites_once():
        table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions().items())
    beyond = [op for name in _BEYOND_CORE for op in _overloads(name)]
    table.update(get_decompositions(beyond))
    for name in _LOWERED_AS_THEY_ARE:
        for op in _overloads(name):
            table.pop(op, None)
    table.update(random_decompositions())
    table.update(embedding_bag_decompositions())
    table.update(foreach_decompositions())
    table.update(strided_decompositions())
    table.update(linalg_decompositions())
    table.update(least_squares_decompositions())
    return table


def decomposition_table() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """A fresh copy of the table to give to ``make_fx(decomposition_table=…)``.

    It holds torch's core decompositions, some more (normalisations, embedding), minus the ops that are lowered as they are, and
    our own decompositions of the random ops, which need an active ``random.RandomStream``.
    """
    # a library's custom ops exist once it is imported, which may be after the first capture
    return {**_table(), **grouped_matmul_decompositions()}
