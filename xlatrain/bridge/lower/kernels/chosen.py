"""The kernels of a captured graph's attention ops, in words."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh
from torch.fx.node import Node

import xlatrain.bridge.capture.attention  # noqa: F401  defines the ops
from xlatrain.bridge.capture.masks.band import CAUSAL, WHOLE, Band
from xlatrain.bridge.lower.kernels import cudnn
from xlatrain.bridge.lower.kernels.choice import Request, Xla, choose
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.mesh.mesh import platform

_OURS = torch.ops.xlatrain


_MASKED = (_OURS.attention.default, _OURS.dropout_attention.default)
_MASKED_BACKWARD = (_OURS.attention_backward.default, _OURS.dropout_attention_backward.default)
_DROPOUT = (_OURS.dropout_attention.default, _OURS.dropout_attention_backward.default)


def is_backward(node: Node) -> bool:
    """Whether a node is the backward pass of attention."""
    return node.target in (*_MASKED_BACKWARD, _OURS.banded_attention_backward.default)


def request_of_node(node: Node) -> Request | None:
    """Describe what an attention op of a captured graph, or its backward pass, asks for; None for other ops."""
    args = node.args[1:] if is_backward(node) else node.args
    if node.target in (*_MASKED, *_MASKED_BACKWARD):
        seen = (args[3] is not None, False, CAUSAL if args[4] else WHOLE)
    elif node.target in (_OURS.banded_attention.default, _OURS.banded_attention_backward.default):
        seen = (False, args[3] is not None, Band(cast(Any, args[5]), cast(Any, args[6])))
    else:
        return None
    q, k, v = (cast(Any, x).meta["val"] for x in args[:3])
    shapes = (tuple(q.shape), tuple(k.shape), tuple(v.shape))
    return Request(*shapes, jnp.dtype(jax_dtype(q.dtype)), *seen, node.target in _DROPOUT)


def kernels_of(graph: torch.fx.Graph, mesh: Mesh) -> list[str]:
    """Tell of each kind of attention op how many there are, which kernel computes it on a mesh, and why.

    Recomputed ops are counted again.
    """
    found = ((node, request_of_node(node)) for node in graph.nodes)
    requests = Counter(request for node, request in found if request is not None and not is_backward(node))
    return [f"{count} × {request}: {_kernel(request, mesh)}" for request, count in requests.items()]


def _kernel(request: Request, mesh: Mesh) -> str:
    choice = choose(request, mesh)
    if isinstance(choice, Xla) and platform(mesh) == "gpu":
        return "cuDNN" if _in_cudnn(request) else "XLA: cuDNN does not compute it"
    return str(choice)


def _in_cudnn(request: Request) -> bool:
    if request.segments or request.mask or request.dropout or request.band not in (CAUSAL, WHOLE):
        return False
    shapes = (request.queries, request.keys, request.values)
    q, k, v = (cast(Any, jax.ShapeDtypeStruct(shape, request.dtype)) for shape in shapes)
    return cudnn.computes(q, k, v, None, request.band.is_causal, 0.0)
