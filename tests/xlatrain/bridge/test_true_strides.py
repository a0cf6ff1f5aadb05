"""Strides while a function is captured: those of torch's CPU kernels, where shape does not say how an image lies in memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from xlatrain.bridge.capture.capture import capture, record
from xlatrain.bridge.random import drawing_by_torch
from xlatrain.bridge.tensors.strides import channels_last_strides, contiguous_strides, strides_of

Layer = Callable[[Tensor], Tensor]
LAST = torch.channels_last


def image(dice: random.Random, channels: int) -> Tensor:
    """An image in a random order of memory, of one pixel or channel now and then."""
    shape = (dice.choice([1, 2, 3]), channels, dice.choice([1, 1, 3, 5]), dice.choice([1, 3, 5]))
    order = list(range(4))
    if dice.random() < 0.3:
        dice.shuffle(order)
    found = torch.randn(*(shape[dim] for dim in order)).permute(*(order.index(dim) for dim in range(4)))
    return found.contiguous(memory_format=LAST) if dice.random() < 0.4 else found


def convolution(dice: random.Random, channels: int, kind: str) -> tuple[Layer, int]:
    groups = channels if kind == "depthwise" else 1
    out, size = groups * dice.choice([1, 2, 3]), dice.choice([1, 1, 3])
    if kind == "transposed":
        made: nn.Module = nn.ConvTranspose2d(channels, out, 2, stride=2)
    else:
        made = nn.Conv2d(channels, out, size, dice.choice([1, 2]), size // 2, groups=groups)
    return (made.to(memory_format=LAST) if dice.random() < 0.4 else made), out  # pyright: ignore[reportCallIssue]


def layers(dice: random.Random, channels: int) -> list[Layer]:
    found: list[Layer] = []
    for _ in range(dice.randrange(1, 5)):
        kind = dice.choice(["convolution", "depthwise", "transposed", "norm", "group norm", "pool", "gate", "swap", "flat"])
        if kind in ("convolution", "depthwise", "transposed"):
            layer, channels = convolution(dice, channels, kind)
        else:
            others: dict[str, Layer] = {
                "norm": nn.BatchNorm2d(channels).eval(),
                "group norm": nn.GroupNorm(1, channels),
                "pool": dice.choice([nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(2, ceil_mode=True), nn.Upsample(scale_factor=2)]),
                "gate": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
                "swap": lambda x: x.transpose(2, 3),
                "flat": lambda x: x.flatten(2).unflatten(2, x.shape[2:]),
            }
            layer = others[kind]
        found += [layer, nn.Dropout(0.5)]
    return [*found, nn.Conv2d(channels, 2, 1)]


def strides_along(x: Tensor, through: list[Layer]) -> list[tuple[int, ...]]:
    found = []
    for layer in through:
        x = layer(x)
        found.append(x.stride())
    return found


@pytest.mark.parametrize("way", [record, capture])
@pytest.mark.parametrize("block", range(4))
def test_strides_of_a_captured_run_are_those_of_torch(block: int, way: Callable[..., Any]) -> None:
    for seed in range(20 * block, 20 * block + 20):
        dice, found = random.Random(seed), []
        channels = dice.choice([1, 1, 2, 4])
        x, through = image(dice, channels), layers(dice, channels)
        expected = strides_along(x, through)

        def run(x: Tensor, through: list[Layer] = through, found: list[list[tuple[int, ...]]] = found) -> Tensor:
            found.append(strides_along(x, through))
            return x

        with drawing_by_torch(True):
            way(run, x)
        assert found == [expected], f"seed {seed}"


def test_orders_of_new_tensors() -> None:
    for shape in ((2, 3, 4, 5), (1, 1, 3, 3), (2, 4, 1, 1), (0, 3, 2, 2), (2, 3, 2, 4, 5)):
        last = LAST if len(shape) == 4 else torch.channels_last_3d
        assert contiguous_strides(shape) == torch.empty(shape).stride()
        assert channels_last_strides(shape) == torch.empty(shape, memory_format=last).stride()


def test_an_image_in_two_orders_keeps_its_strides() -> None:
    one = torch.empty(4, 1, 3, 3).to(memory_format=LAST)
    assert one.is_contiguous() and strides_of(one) == (9, 1, 3, 1)
    assert strides_of(torch.empty(4, 1, 3, 3)) is None
    assert strides_of(torch.empty(1, 5)[:, :5]) is None
