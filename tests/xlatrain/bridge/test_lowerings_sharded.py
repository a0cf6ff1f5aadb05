"""Lowerings whose arguments are split over eight devices give what they give on one: XLA partitions what we wrote as written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn

from tests.xlatrain.bridge._compare import floats, with_gradients
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.mesh.mesh import make_mesh

TARGETS = torch.arange(8 * 3).reshape(8, 3) % 4 + 1

# name → (function, its arguments; those with a first dim of 8 are split)
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "convolution": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (floats(8, 3, 6, 6), floats(4, 3, 3, 3))),
    "convolution of split channels": (lambda x, w: F.conv2d(x, w, padding=1), (floats(2, 3, 6, 6), floats(8, 3, 3, 3))),
    "transposed convolution": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (floats(8, 3, 4, 4), floats(3, 4, 3, 3))),
    "grouped convolution": (
        lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2, groups=3),
        (floats(8, 6, 9, 8), floats(9, 2, 3, 3)),
    ),
    "grouped transposed convolution": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=2),
        (floats(8, 4, 4, 3), floats(4, 3, 3, 2)),
    ),
    "depthwise convolution of a smaller batch": (
        lambda x, w: F.conv2d(x.reshape(4, 16, 4, 5, 5).mean(0), w, padding=1, groups=4),
        (floats(8, 8, 4, 5, 5), floats(4, 1, 3, 3)),
    ),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), (floats(8, 3, 7, 7),)),
    "adaptive max pool": (lambda x: F.adaptive_max_pool2d(x, 3), (floats(8, 3, 7, 7),)),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1), (floats(8, 3, 7, 7),)),
    "bilinear": (lambda x: F.interpolate(x, size=(9, 5), mode="bilinear"), (floats(8, 3, 7, 7),)),
    "reflection": (lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"), (floats(8, 3, 5, 5),)),
    "batch norm": (lambda x, w: F.batch_norm(x, None, None, w, training=True), (floats(8, 3, 5, 5), floats(3))),
    "group norm": (lambda x, w: F.group_norm(x, 3, w), (floats(8, 6, 5), floats(6))),
    "layer norm": (lambda x, w: F.layer_norm(x, (5,), w), (floats(8, 6, 5), floats(5))),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 7, 3], [3, 0, 2]]), w), (floats(8, 5),)),
    "embedding bag": (lambda w: F.embedding_bag(torch.tensor([[1, 7, 3], [3, 0, 2]]), w, mode="max"), (floats(8, 5),)),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        tuple(floats(8, heads, 6, 4, seed=heads, dtype=torch.bfloat16) for heads in (4, 2, 2)),
    ),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.arange(8) % 5), (floats(8, 5),)),
    "ctc": (
        lambda x: F.ctc_loss(x.transpose(0, 1).log_softmax(2), TARGETS, [9] * 8, [3] * 8),
        (floats(8, 9, 5),),
    ),
    "slice assignment": (lambda w: _written(w), (floats(8, 6),)),
}


def _written(w: torch.Tensor) -> torch.Tensor:
    y = w * 2
    y[:3] = 0.0
    y[5] = 1.0
    y[2:, 1::2] += w[2:, 1::2]
    return y


MESHES = {"each its rows": {"data": 8}, "two the same rows": {"data": 4, "tensor": 2}}


@pytest.mark.parametrize("case", CASES)
def test_sharded_equals_unsharded(case: str) -> None:
    fn, args = CASES[case]
    captured = capture(with_gradients(fn), *args)
    arrays = [as_numpy(arg.detach()) for arg in args]
    expected = jax.jit(lower(captured))(arrays, None)
    for what, axes in MESHES.items():
        mesh = make_mesh(axes)

        def split(shape: tuple[int, ...], mesh: Mesh = mesh) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec("data") if shape and shape[0] == 8 else PartitionSpec())

        placed = [jax.device_put(array, split(array.shape)) for array in arrays]
        run = lower(captured, partitioned=True)
        got = jax.jit(run, out_shardings=[split(spec.shape) for spec in captured.outputs])(placed, None)
        for one, other in zip(got, expected, strict=True):
            wide = np.float32 if one.dtype.itemsize == 2 else one.dtype
            np.testing.assert_allclose(np.asarray(one, wide), np.asarray(other, wide), rtol=1e-4, atol=1e-5, err_msg=what)


def test_sharded_recurrence_equals_unsharded() -> None:
    torch.manual_seed(0)
    net = nn.LSTM(3, 8, batch_first=True)
    names, parameters = zip(*net.named_parameters(), strict=True)

    def fn(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, dict(zip(names, weights, strict=True)), x)[0]

    args = floats(8, 5, 3), *parameters
    captured = capture(with_gradients(fn), *args)
    arrays = [as_numpy(arg.detach()) for arg in args]
    expected = jax.jit(lower(captured))(arrays, None)
    rows = NamedSharding(make_mesh({"data": 8}), PartitionSpec("data"))
    got = jax.jit(lower(captured))([jax.device_put(array, rows) for array in arrays], None)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
