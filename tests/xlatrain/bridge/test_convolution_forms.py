"""Convolutions in the forms that are chosen for XLA:CPU, by shape, forward and both gradients, on one device and on eight."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from jax.sharding import NamedSharding, PartitionSpec

from tests.xlatrain.bridge._compare import as_host, assert_matches_eager, floats, run_captured, with_gradients
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.lower.lowerings import columns_convolution as columns
from xlatrain.bridge.lower.lowerings import convolution
from xlatrain.bridge.lower.lowerings import depthwise_convolution as depthwise
from xlatrain.bridge.lower.lowerings.windows import Window
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.mesh.mesh import make_mesh

Function = Callable[..., torch.Tensor]


def conv(**options: Any) -> Function:
    return lambda x, w: [F.conv1d, F.conv2d, F.conv3d][x.ndim - 3](x, w, **options)


def conv_transpose(**options: Any) -> Function:
    return lambda x, w: [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d][x.ndim - 3](x, w, **options)


# name → the form, the function, the shapes of image and kernel
CASES: dict[str, tuple[ModuleType | None, Function, Sequence[int], Sequence[int]]] = {
    "kernel larger than the image": (columns, conv(padding=1), (8, 3, 2, 2), (4, 3, 3, 3)),
    "one pixel": (columns, conv(padding=1), (8, 3, 1, 1), (4, 3, 3, 3)),
    "one pixel, no padding around a kernel of size 1": (columns, conv(padding=1), (8, 3, 1, 1), (4, 3, 1, 1)),
    "kernel larger than the result": (columns, conv(stride=2, padding=1), (8, 3, 4, 3), (4, 3, 3, 3)),
    "few positions": (columns, conv(padding=1), (8, 2, 3, 3), (40, 2, 2, 3)),
    "strided past the end": (columns, conv(stride=3), (8, 2, 8, 9), (40, 2, 2, 2)),
    "padded beyond its reach": (columns, conv(stride=2, padding=3), (8, 3, 2, 2), (4, 3, 2, 2)),
    "padding alone": (columns, conv(stride=2, padding=1), (8, 3, 1, 1), (4, 3, 1, 2)),
    "taps apart": (columns, conv(stride=3, padding=3), (8, 3, 1), (4, 3, 5)),
    "dilated": (columns, conv(padding=(2, 3), dilation=(2, 3)), (8, 3, 2, 3), (4, 3, 3, 3)),
    "1-D": (columns, conv(padding=3), (8, 3, 2), (4, 3, 7)),
    "3-D": (columns, conv(padding=1), (8, 2, 2, 1, 2), (3, 2, 3, 3, 3)),
    "patches": (columns, conv(stride=2), (8, 3, 5, 6), (4, 3, 2, 2)),
    "patches of 3-D": (columns, conv(stride=(1, 2, 3)), (8, 2, 2, 4, 7), (3, 2, 1, 2, 3)),
    "transposed to patches": (columns, conv_transpose(stride=2), (8, 3, 2, 3), (3, 4, 2, 2)),
    "transposed to patches and more": (columns, conv_transpose(stride=2, output_padding=1), (8, 3, 2, 3), (3, 4, 2, 2)),
    "transposed, of one pixel": (columns, conv_transpose(), (8, 3, 1, 1), (3, 4, 4, 4)),
    "transposed, small": (columns, conv_transpose(stride=2, padding=1, output_padding=1), (8, 3, 2, 2), (3, 4, 3, 3)),
    "transposed, output padding beyond its stride": (
        columns,
        conv_transpose(stride=(1, 2), padding=(0, 1), output_padding=(2, 1), dilation=(3, 1)),
        (8, 40, 2, 2),
        (40, 2, 2, 3),
    ),
    "depthwise": (depthwise, conv(padding=1, groups=3), (8, 3, 6, 5), (3, 1, 3, 3)),
    "depthwise, kernel larger than the image": (depthwise, conv(padding=2, groups=3), (8, 3, 2, 2), (3, 1, 5, 5)),
    "depthwise, strided and dilated": (
        depthwise,
        conv(stride=(2, 3), padding=(1, 2), dilation=(2, 1), groups=3),
        (8, 3, 9, 8),
        (3, 1, 3, 2),
    ),
    "depthwise, 1-D": (depthwise, conv(padding=2, groups=4), (8, 4, 7), (4, 1, 4)),
    "depthwise, 3-D": (depthwise, conv(padding=1, stride=2, groups=2), (8, 2, 3, 4, 5), (2, 1, 3, 3, 3)),
    "depthwise, padded beyond its reach": (depthwise, conv(stride=2, padding=3, groups=3), (8, 3, 5, 4), (3, 1, 2, 2)),
    "depthwise, transposed": (
        depthwise,
        conv_transpose(stride=2, padding=1, output_padding=1, groups=3),
        (8, 3, 4, 5),
        (3, 1, 3, 3),
    ),
    "volumes": (None, conv(padding=(1, 0, 1)), (8, 2, 5, 6, 7), (3, 2, 3, 2, 3)),
    "volumes, one channel to many": (None, conv(padding=(1, 0, 1)), (8, 1, 5, 6, 7), (6, 1, 3, 2, 3)),
    "volumes, strided and dilated": (
        None,
        conv(stride=(2, 1, 2), padding=(2, 1, 0), dilation=(2, 1, 1)),
        (8, 2, 8, 6, 7),
        (3, 2, 3, 3, 2),
    ),
    "volumes, transposed": (
        None,
        conv_transpose(stride=(2, 2, 1), padding=1, output_padding=(1, 0, 0)),
        (8, 2, 5, 6, 7),
        (2, 3, 3, 3, 3),
    ),
    "grouped": (None, conv(padding=1, groups=2), (8, 4, 2, 2), (6, 2, 3, 3)),
    "two channels of each group": (None, conv(padding=1, groups=3), (8, 3, 4, 4), (6, 1, 3, 3)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Function, Sequence[int], Sequence[int]]:
    """A function and its shapes, once it is seen that the form is the expected one in all directions."""
    form, function, image, kernel = CASES[request.param]
    chosen: list[ModuleType | None] = []
    form_of = convolution.form_of

    def noted(*args: Any) -> ModuleType | None:
        chosen.append(form_of(*args))
        return chosen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(convolution, "form_of", noted)
        captured = capture(with_gradients(function), floats(*image), floats(*kernel))
        jax.eval_shape(lambda arrays: lower(captured)(arrays, None), [np.ones(shape, np.float32) for shape in (image, kernel)])
    assert len(chosen) >= 2
    assert set(chosen) == {form}
    return function, image, kernel


def test_as_torch(case: tuple[Function, Sequence[int], Sequence[int]]) -> None:
    function, image, kernel = case
    assert_matches_eager(with_gradients(function), floats(*image), floats(*kernel), rtol=1e-4, atol=1e-5)
    # beside float32: torch leaves the gradient of taps that see no pixel uninitialised in bfloat16
    halves = [floats(*shape, dtype=torch.bfloat16) for shape in (image, kernel)]
    got = run_captured(with_gradients(function), *halves)
    expected = with_gradients(function)(*(half.detach().float().requires_grad_() for half in halves))
    for one, other in zip(*map(pytree.tree_leaves, (got, as_host(expected))), strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other, rtol=2e-2, atol=2e-2 * np.abs(other).max())


def test_on_eight_devices(case: tuple[Function, Sequence[int], Sequence[int]]) -> None:
    function, *shapes = case
    captured = capture(with_gradients(function), *(floats(*shape) for shape in shapes))
    arrays = [as_numpy(floats(*shape).detach()) for shape in shapes]
    expected = jax.jit(lower(captured))(arrays, None)
    for axes in ({"data": 8}, {"data": 4, "tensor": 2}):
        mesh = make_mesh(axes)
        rows, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data"), PartitionSpec()))
        placed = [jax.device_put(array, split) for array, split in zip(arrays, (rows, whole), strict=True)]
        got = jax.jit(lower(captured, partitioned=True), out_shardings=[rows, rows, whole])(placed, None)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=str(axes))


@pytest.mark.parametrize(("name", "channels"), [("volumes", (2, 9)), ("volumes, one channel to many", (3, 6))])
def test_volumes_are_convolved_as_images(name: str, channels: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU takes 5 to 12 times torch's time for three spatial dims; but of few channels all taps of it are best at once.

    Their sums are no part of the ops that read them: each of these would compute them anew.
    """
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    _, function, image, kernel = CASES[name]
    captured = capture(with_gradients(function), floats(*image), floats(*kernel))
    arrays = [np.ones(shape, np.float32) for shape in (image, kernel)]
    text = jax.jit(lower(captured)).lower(arrays, None).as_text()
    found = re.findall(r"stablehlo\.convolution.* : \(tensor<([0-9x]+)xf32>, tensor<([0-9x]+)xf32>", text)
    assert len(found) == 3
    assert {len(shape.split("x")) for shapes in found for shape in shapes} == {4}
    assert channels in {tuple(map(int, kernel.split("x")[2:])) for _, kernel in found}
    sums = re.findall("call @_sum_of_taps.*", text)
    assert sums
    assert all('inlineable = "false"' in line for line in sums)


def test_depthwise_sums_are_no_part_of_the_ops_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would compute them anew: a LayerNorm's mean, variance and rest; XLA would take the time and memory of each."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    function = with_gradients(lambda x, w: F.layer_norm(F.conv2d(x, w, padding=1, groups=3), (6, 5)))
    image, kernel = floats(8, 3, 6, 5), floats(3, 1, 3, 3)
    program = jax.jit(lower(capture(function, image, kernel))).lower([as_numpy(one.detach()) for one in (image, kernel)], None)
    products = re.findall(r"= f32\[8,6,5,3\]\S* multiply\(", program.compile().as_text())
    assert len(products) == 3 * 9  # of the convolution and both its gradients; they were 90


def test_taps_that_see_padding_alone_are_not_reached() -> None:
    for image, kernel, stride, padding, dilation in itertools.product((1, 2, 5), (1, 3, 4), (1, 2, 3), (0, 1, 3), (1, 2)):
        window = Window((kernel,), (stride,), (padding,), (dilation,))
        (out,) = window.positions([image])
        seeing = {tap for tap in range(kernel) for at in range(out) if 0 <= at * stride + tap * dilation - padding < image}
        (reached,) = window.reached([image], [out])
        assert seeing <= set(reached)
        assert not seeing or (min(seeing), max(seeing)) == (reached[0], reached[-1])
