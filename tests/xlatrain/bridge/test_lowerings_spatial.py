"""Convolution, pooling, interpolation, padding and normalisation, forward and backward, against torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import assert_matches_eager, floats, run_captured, with_gradients
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.lower.lowerings.convolution import _Convolution

CONVOLUTIONS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), (floats(2, 3, 9), floats(4, 3, 3), floats(4))),
    "2d": (lambda x, w, b: F.conv2d(x, w, b), (floats(2, 3, 6, 7), floats(4, 3, 3, 2), floats(4))),
    "2d strided past the end": (lambda x, w: F.conv2d(x, w, stride=3), (floats(2, 3, 8, 9), floats(4, 3, 2, 2))),
    "2d dilated": (
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(2, 3), dilation=(2, 3)),
        (floats(2, 3, 9, 8), floats(4, 3, 3, 3), floats(4)),
    ),
    "2d grouped": (lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2), (floats(2, 4, 5, 5), floats(6, 2, 3, 3), floats(6))),
    "2d depthwise": (lambda x, w: F.conv2d(x, w, padding=3, groups=4), (floats(2, 4, 7, 7), floats(4, 1, 7, 7))),
    "2d same": (lambda x, w: F.conv2d(x, w, padding="same"), (floats(2, 3, 6, 7), floats(4, 3, 4, 2))),
    "2d of size 1": (F.conv2d, (floats(2, 3, 6, 7), floats(4, 3, 1, 1), floats(4))),
    "2d of size 1 with stride": (lambda x, w: F.conv2d(x, w, stride=(2, 3)), (floats(2, 3, 6, 7), floats(4, 3, 1, 1))),
    "1d of size 1": (F.conv1d, (floats(2, 3, 6), floats(4, 3, 1))),
    "2d unbatched": (lambda x, w: F.conv2d(x, w), (floats(3, 6, 7), floats(4, 3, 3, 2))),
    "3d": (lambda x, w, b: F.conv3d(x, w, b, stride=2, padding=1), (floats(2, 2, 5, 6, 7), floats(3, 2, 3, 2, 3), floats(3))),
    "1d transposed": (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=3, padding=1, output_padding=2),
        (floats(2, 4, 5), floats(4, 3, 4), floats(3)),
    ),
    "2d transposed grouped": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=(1, 0), groups=2, dilation=(1, 2)),
        (floats(2, 4, 4, 5), floats(4, 3, 3, 3), floats(6)),
    ),
    "2d transposed, output padding beyond its stride": (
        lambda x, w: F.conv_transpose2d(x, w, stride=(1, 2), padding=(0, 1), output_padding=(2, 1), dilation=(3, 1)),
        (floats(2, 3, 4, 5), floats(3, 2, 2, 3)),
    ),
    "2d padded beyond its reach": (lambda x, w: F.conv2d(x, w, stride=2, padding=3), (floats(2, 3, 5, 4), floats(4, 3, 2, 2))),
    "3d transposed": (lambda x, w: F.conv_transpose3d(x, w, stride=2), (floats(1, 2, 3, 3, 2), floats(2, 3, 2, 3, 2))),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case: str) -> None:
    fn, args = CONVOLUTIONS[case]
    assert_matches_eager(with_gradients(fn), *args, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_off_the_cpu_is_the_same(transposed: bool) -> None:
    convolve = _Convolution.from_options(2, [2], [1, 0], [1, 2], transposed, [1, 0] if transposed else [0], 1)
    shapes = (2, 3, 6, 7), (3, 3, 3, 2)
    x, weight = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in shapes)
    grad = np.random.default_rng(1).standard_normal(jax.eval_shape(convolve, x, weight).shape, np.float32)

    @jax.jit
    def both(grad: jax.Array, x: jax.Array, weight: jax.Array) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        wanted = (True, True)
        there = convolve(x, weight), *convolve.gradients(grad, x, weight, wanted)
        return there, (convolve.on_cpu(x, weight), *convolve.gradients_on_cpu(grad, x, weight, wanted))

    there, here = both(grad, x, weight)
    for one, other in zip(there, here, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fn", [F.conv2d, F.conv_transpose2d])
def test_convolutions_have_the_form_that_is_fast_in_loops_on_cpu(fn: Callable[..., Any]) -> None:
    captured = capture(with_gradients(fn), floats(2, 3, 6, 7), floats(3, 3, 3, 3))
    inputs = [jax.ShapeDtypeStruct(spec.shape, "float32") for spec in captured.inputs]
    text = jax.jit(lambda inputs: lower(captured)(inputs, None)).lower(inputs).as_text()
    forms = re.findall(r"dim_numbers = (\[.*?\]x\[.*?\]->\[.*?\])", text)
    assert len(forms) == 3
    assert set(forms) == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}


def test_convolution_double_backward() -> None:
    def penalty(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (grad,) = torch.autograd.grad(F.conv2d(x, w, stride=2, padding=1).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), (x, w))

    assert_matches_eager(penalty, floats(2, 2, 5, 5), floats(3, 2, 3, 3), rtol=1e-4, atol=1e-4)


TIES = torch.tensor([[[1.0, 3, 3, 0], [3, 3, 2, 2], [2, 2, 2, 2], [0, 2, 2, -1]]]).requires_grad_()
LOWEST = torch.full((1, 2, 5, 5), -torch.inf).requires_grad_()
NANS = torch.tensor([[[0.0, torch.nan, 2], [torch.nan, 4, 1], [7, 1, 3]]]).requires_grad_()

MAX_POOLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "1d": (lambda x: F.max_pool1d(x, 3, 2, 1), (floats(2, 3, 10),)),
    "2d": (lambda x: F.max_pool2d(x, 2), (floats(2, 3, 6, 7),)),
    "2d overlapping": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (floats(2, 3, 7, 8),)),
    "2d dilated, ceil": (
        lambda x: F.max_pool2d(x, (2, 3), (2, 3), (1, 0), (2, 1), ceil_mode=True, return_indices=True),
        (floats(2, 3, 7, 8),),
    ),
    "2d large kernel": (lambda x: F.max_pool2d(x, 9, 3, 4, return_indices=True), (floats(1, 2, 14, 15),)),
    "2d unbatched": (lambda x: F.max_pool2d(x, 2, 1), (floats(3, 6, 7),)),
    "2d ties": (lambda x: F.max_pool2d(x, 2, 1, 1, return_indices=True), (TIES,)),
    "2d all -inf": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (LOWEST,)),
    "2d nan": (lambda x: F.max_pool2d(x, 2, 1, return_indices=True), (NANS,)),
    "3d": (lambda x: F.max_pool3d(x, 2, 2, return_indices=True), (floats(1, 2, 4, 5, 6),)),
    "3d overlapping": (lambda x: F.max_pool3d(x, 3, 2, 1, return_indices=True), (floats(1, 2, 5, 5, 6),)),
    "adaptive 1d": (lambda x: F.adaptive_max_pool1d(x, 3), (floats(2, 3, 10),)),
    "adaptive 2d": (lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True), (floats(2, 3, 7, 8),)),
    "adaptive 2d to one": (lambda x: F.adaptive_max_pool2d(x, 1), (floats(2, 3, 7, 8),)),
    "adaptive 3d": (lambda x: F.adaptive_max_pool3d(x, (2, 3, 2), return_indices=True), (floats(1, 2, 5, 4, 6),)),
    "unpool 2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (floats(2, 3, 6, 8),)),
}


@pytest.mark.parametrize("case", MAX_POOLS)
def test_max_pool(case: str) -> None:
    fn, args = MAX_POOLS[case]
    assert_matches_eager(with_gradients(fn), *args)


def test_gradients_of_max_pools_on_a_cpu_are_summed_in_torchs_order() -> None:
    """A scatter, where each window's gradient goes to one place: sums of shifted gradients have another order."""

    def gradient(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((F.max_pool2d(x, 5, 1, 2) * weight).sum(), x)[0]

    args = floats(2, 3, 16, 16), floats(2, 3, 16, 16)
    np.testing.assert_array_equal(run_captured(gradient, *args), gradient(*args).numpy())


AVG_POOLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "1d": (lambda x: F.avg_pool1d(x, 3, 2, 1), (floats(2, 3, 10),)),
    "2d": (lambda x: F.avg_pool2d(x, 2), (floats(2, 3, 6, 7),)),
    "2d ceil": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (floats(2, 3, 8, 9),)),
    "2d without padding": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, count_include_pad=False), (floats(2, 3, 8, 9),)),
    "2d leaving a rest": (lambda x: F.avg_pool2d(x, 2, 3), (floats(2, 3, 9, 10),)),
    "2d divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), (floats(2, 3, 6, 6),)),
    "3d": (lambda x: F.avg_pool3d(x, 2, 2, 1), (floats(1, 2, 4, 5, 6),)),
    "lp": (lambda x: F.lp_pool2d(x, 2.0, 2), (floats(2, 3, 6, 7),)),
    "adaptive 1d": (lambda x: F.adaptive_avg_pool1d(x, 4), (floats(2, 3, 10),)),
    "adaptive 2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (floats(2, 3, 7, 8),)),
    "adaptive 2d to one": (lambda x: F.adaptive_avg_pool2d(x, 1), (floats(2, 3, 7, 8),)),
    "adaptive 2d larger": (lambda x: F.adaptive_avg_pool2d(x, (5, 7)), (floats(2, 3, 3, 4),)),
    "adaptive 3d": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 1)), (floats(1, 2, 5, 4, 6),)),
}


@pytest.mark.parametrize("case", AVG_POOLS)
def test_avg_pool(case: str) -> None:
    fn, args = AVG_POOLS[case]
    assert_matches_eager(with_gradients(fn), *args)


def _resized(mode: str, x: torch.Tensor, **options: Any) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    return (lambda x: F.interpolate(x, mode=mode, **options)), (x,)


INTERPOLATIONS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "nearest 1d": _resized("nearest", floats(2, 3, 5), scale_factor=2),
    "nearest 2d": _resized("nearest", floats(2, 3, 5, 4), size=(7, 3)),
    "nearest 2d factor": _resized("nearest", floats(2, 3, 5, 4), scale_factor=(1.7, 0.6)),
    "nearest 3d": _resized("nearest", floats(1, 2, 3, 4, 5), scale_factor=2),
    "nearest-exact 2d": _resized("nearest-exact", floats(2, 3, 5, 4), size=(7, 3)),
    "nearest-exact 3d": _resized("nearest-exact", floats(1, 2, 3, 4, 5), size=(5, 3, 7)),
    "linear": _resized("linear", floats(2, 3, 5), size=8),
    "bilinear": _resized("bilinear", floats(2, 3, 5, 4), size=(7, 9)),
    "bilinear corners": _resized("bilinear", floats(2, 3, 5, 4), size=(7, 9), align_corners=True),
    "bilinear factor": _resized("bilinear", floats(2, 3, 5, 4), scale_factor=(1.7, 0.6)),
    "bilinear recomputed factor": _resized("bilinear", floats(2, 3, 5, 4), scale_factor=1.7, recompute_scale_factor=True),
    "bilinear to one": _resized("bilinear", floats(2, 3, 5, 4), size=1, align_corners=True),
    "bilinear up 20 times": _resized("bilinear", floats(1, 2, 3, 4), scale_factor=20),
    "bilinear antialiased": _resized("bilinear", floats(2, 3, 11, 12), size=(4, 5), antialias=True),
    "bicubic": _resized("bicubic", floats(2, 3, 5, 4), size=(7, 9)),
    "bicubic corners": _resized("bicubic", floats(2, 3, 5, 4), size=(3, 9), align_corners=True),
    "bicubic antialiased": _resized("bicubic", floats(2, 3, 11, 12), size=(4, 15), antialias=True),
    "trilinear": _resized("trilinear", floats(1, 2, 3, 4, 5), size=(5, 3, 8)),
    "area": _resized("area", floats(2, 3, 7, 8), size=(3, 5)),
}


@pytest.mark.parametrize("case", INTERPOLATIONS)
def test_interpolate(case: str) -> None:
    fn, args = INTERPOLATIONS[case]
    assert_matches_eager(with_gradients(fn), *args, rtol=1e-4, atol=1e-5)


PADS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "constant": (lambda x: F.pad(x, (1, 2, -1, 3), value=1.5), (floats(2, 3, 5, 4),)),
    "reflect 1d": (lambda x: F.pad(x, (2, 3), mode="reflect"), (floats(2, 3, 5),)),
    "reflect 2d": (lambda x: F.pad(x, (2, 3, 1, 0), mode="reflect"), (floats(2, 3, 5, 4),)),
    "reflect 3d": (lambda x: F.pad(x, (2, 1, 1, 0, 2, 2), mode="reflect"), (floats(1, 2, 4, 3, 4),)),
    "replicate 1d": (lambda x: F.pad(x, (2, 7), mode="replicate"), (floats(2, 3, 5),)),
    "replicate 2d cut": (lambda x: F.pad(x, (2, -1, 1, 3), mode="replicate"), (floats(2, 3, 5, 4),)),
    "replicate 3d": (lambda x: F.pad(x, (2, 1, 1, 0, 2, 2), mode="replicate"), (floats(1, 2, 4, 3, 4),)),
    "circular": (lambda x: F.pad(x, (2, 1, 1, 0), mode="circular"), (floats(2, 3, 5, 4),)),
}


@pytest.mark.parametrize("case", PADS)
def test_pad(case: str) -> None:
    fn, args = PADS[case]
    assert_matches_eager(with_gradients(fn), *args)


NORMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "layer": (lambda x, w, b: F.layer_norm(x, (4, 5), w, b), (floats(2, 3, 4, 5), floats(4, 5), floats(4, 5))),
    "layer plain": (lambda x: F.layer_norm(x, (5,)), (floats(2, 3, 5),)),
    "layer without bias": (lambda x, w: F.layer_norm(x, (5,), w), (floats(2, 3, 5), floats(5))),
    "group": (lambda x, w, b: F.group_norm(x, 3, w, b), (floats(2, 6, 4, 5), floats(6), floats(6))),
    "group of an empty batch": (lambda x: F.group_norm(x, 2), (floats(0, 6, 7),)),
    "group plain": (lambda x: F.group_norm(x, 2), (floats(2, 6, 7),)),
    "instance": (lambda x, w, b: F.instance_norm(x, None, None, w, b), (floats(2, 3, 4, 5), floats(3), floats(3))),
    "rms": (lambda x, w: F.rms_norm(x, (5,), w), (floats(2, 3, 5), floats(5))),
    "batch training": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (floats(4, 3, 5), floats(3), floats(3))),
    "local response": (lambda x: F.local_response_norm(x, 3), (floats(2, 6, 4),)),
    "weight": (lambda v, g: torch._weight_norm(v, g, 0), (floats(4, 3), floats(4, 1))),
}


@pytest.mark.parametrize("case", NORMS)
def test_norm(case: str) -> None:
    fn, args = NORMS[case]
    assert_matches_eager(with_gradients(fn), *args, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_running_statistics(training: bool) -> None:
    def run(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.batch_norm(x, mean, var, training=training, momentum=0.3)
        return (y, *torch.autograd.grad(y.pow(3).sum(), x), mean, var)

    args = floats(4, 3, 5), floats(3, requires_grad=False), floats(3, requires_grad=False).detach().abs()
    assert_matches_eager(run, *args, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda x, w: F.conv2d(x, w, padding=1), [(2, 3, 5, 5), (4, 3, 3, 3)]),
        (lambda x: F.avg_pool2d(x, 3, 2, 1), [(2, 3, 7, 7)]),
        (lambda x: F.max_pool2d(x, 3, 2, 1), [(2, 3, 7, 7)]),
        (lambda x: F.interpolate(x, size=(9, 5), mode="bilinear"), [(2, 3, 7, 7)]),
        (lambda x, w, b: F.layer_norm(x, (5,), w, b), [(2, 3, 5), (5,), (5,)]),
    ],
    ids=["conv", "avg_pool", "max_pool", "bilinear", "layer_norm"],
)
def test_bfloat16(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    args = [floats(*shape, dtype=torch.bfloat16) for shape in shapes]
    assert_matches_eager(with_gradients(fn), *args, rtol=3e-2, atol=3e-2)
