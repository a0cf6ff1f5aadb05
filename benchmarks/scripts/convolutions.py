"""Convolutions of a model zoo, forward and both gradients: torch's, and XLA's as the lowerings have them; one core, one thread.

Pin the process to one core (``taskset -c 0``): processor time of one thread does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"

import jax
import numpy as np
import torch

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower
from xlatrain.host import malloc
from xlatrain.mesh.mesh import make_mesh
from xlatrain.xla.compiler_options import compiler_options

DIRECTIONS = ("forward", "by input", "by weight")
RNG = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Case:
    """A convolution of ``batch`` images; padding is half of the kernel unless said."""

    model: str
    batch: int
    channels: int
    image: tuple[int, ...]
    out: int
    kernel: int
    stride: int = 1
    padding: int | None = None
    dilation: int = 1
    groups: int = 1
    transposed: bool = False

    @property
    def name(self) -> str:
        image = ",".join(map(str, (self.batch, self.channels, *self.image)))
        kinds = f"{self.kernel}" + (f" / {self.stride}" if self.stride > 1 else "")
        kinds += (f" dilated {self.dilation}" if self.dilation > 1 else "") + (
            f" groups {self.groups}" if self.groups > 1 else ""
        )
        return f"{self.model}: [{image}] to {self.out}, kernel {kinds}{', transposed' if self.transposed else ''}"

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Image and kernel."""
        channels = (self.channels, self.out // self.groups) if self.transposed else (self.out, self.channels // self.groups)
        shapes = (self.batch, self.channels, *self.image), (*channels, *(self.kernel,) * len(self.image))
        image, kernel = (torch.randn(shape, generator=RNG) for shape in shapes)
        return image, kernel

    def options(self) -> tuple[object, ...]:
        """The arguments of ``aten.convolution`` after the bias."""
        padding = self.dilation * (self.kernel - 1) // 2 if self.padding is None else self.padding
        dims = len(self.image)
        window = [self.stride] * dims, [padding] * dims, [self.dilation] * dims
        return *window, self.transposed, [0] * dims, self.groups

    def functions(self) -> dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]:
        """Direction → function and its arguments."""
        x, weight = self.arguments()
        options = self.options()

        def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.convolution(x, weight, None, *options)

        def by_input(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.convolution_backward(grad, x, weight, None, *options, [True, False, False])[0]

        def by_weight(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.convolution_backward(grad, x, weight, None, *options, [False, True, False])[1]

        grad = torch.randn(forward(x, weight).shape, generator=RNG)
        directions = (forward, (x, weight)), (by_input, (grad, x, weight)), (by_weight, (grad, x, weight))
        return dict(zip(DIRECTIONS, directions, strict=True))


CASES = (
    Case("ResNet stem", 8, 3, (64, 64), 64, 7, 2),
    Case("ResNet stem", 4, 3, (128, 128), 64, 7, 2),
    Case("ResNet", 32, 64, (16, 16), 64, 3),
    Case("ResNet", 32, 64, (16, 16), 128, 3, 2),
    Case("ResNet", 32, 128, (8, 8), 128, 3),
    Case("ResNet", 32, 128, (8, 8), 256, 3, 2),
    Case("ResNet", 32, 256, (4, 4), 256, 3),
    Case("ResNet", 32, 256, (4, 4), 512, 3, 2),
    Case("ResNet", 32, 256, (4, 4), 512, 1, 2, 0),
    Case("ResNet", 32, 512, (2, 2), 512, 3),
    Case("ResNet", 2, 512, (2, 2), 512, 3),
    Case("ResNet", 256, 512, (2, 2), 512, 3),
    Case("ResNet", 32, 512, (1, 1), 512, 3),
    Case("ResNet", 2, 64, (56, 56), 64, 3),
    Case("ResNet", 2, 256, (14, 14), 256, 3),
    Case("ResNet", 2, 512, (7, 7), 512, 3),
    Case("ResNet", 8, 512, (7, 7), 512, 3),
    Case("ResNet", 8, 512, (4, 4), 512, 3),
    Case("ResNet", 2, 1024, (14, 14), 256, 1, 1, 0),
    Case("ResNet", 2, 2048, (7, 7), 512, 1, 1, 0),
    Case("ResNeXt", 8, 128, (14, 14), 128, 3, groups=32),
    Case("EfficientNet stem", 8, 3, (64, 64), 32, 3, 2),
    Case("EfficientNet", 8, 144, (16, 16), 144, 5, 2, groups=144),
    Case("EfficientNet", 8, 672, (4, 4), 672, 5, groups=672),
    Case("EfficientNet", 8, 1152, (2, 2), 1152, 5, groups=1152),
    Case("EfficientNet", 8, 1152, (7, 7), 1152, 3, groups=1152),
    Case("EfficientNet squeeze", 8, 1152, (1, 1), 48, 1, 1, 0),
    Case("EfficientNet", 8, 320, (2, 2), 1280, 1, 1, 0),
    Case("MobileNet", 8, 96, (28, 28), 96, 3, groups=96),
    Case("MobileNet", 8, 96, (28, 28), 96, 3, 2, groups=96),
    Case("MobileNet", 8, 960, (2, 2), 960, 3, groups=960),
    Case("ConvNeXt stem", 4, 3, (64, 64), 96, 4, 4, 0),
    Case("ConvNeXt", 4, 96, (32, 32), 96, 7, groups=96),
    Case("ConvNeXt", 8, 768, (2, 2), 768, 7, groups=768),
    Case("ConvNeXt", 4, 96, (32, 32), 192, 2, 2, 0),
    Case("ConvNeXt", 8, 384, (4, 4), 768, 2, 2, 0),
    Case("ViT patches", 4, 3, (64, 64), 192, 8, 8, 0),
    Case("U-Net", 4, 32, (64, 64), 32, 3),
    Case("U-Net", 4, 128, (16, 16), 128, 3),
    Case("U-Net", 4, 512, (4, 4), 512, 3),
    Case("U-Net", 4, 128, (16, 16), 64, 2, 2, 0, transposed=True),
    Case("U-Net", 4, 512, (4, 4), 256, 2, 2, 0, transposed=True),
    Case("DCGAN", 32, 128, (1, 1), 256, 4, 1, 0, transposed=True),
    Case("DCGAN", 32, 256, (4, 4), 128, 4, 2, 1, transposed=True),
    Case("DeepLab", 4, 256, (8, 8), 64, 3, 1, 6, 6),
    Case("WaveNet", 4, 64, (1024,), 64, 2, 1, 0, 16),
    Case("1-D", 16, 256, (16,), 256, 3),
    Case("1-D", 16, 512, (2,), 512, 7),
    Case("3-D U-Net", 1, 16, (32, 32, 32), 16, 3),
    Case("3-D U-Net", 2, 128, (4, 4, 4), 128, 3),
    Case("3-D U-Net", 2, 256, (2, 2, 2), 256, 3),
    Case("3-D U-Net", 2, 64, (8, 8, 8), 128, 3, 2),
)


def measure(
    function: Callable[..., torch.Tensor], arguments: tuple[torch.Tensor, ...], repetitions: int, options: dict[str, str]
) -> dict[str, float]:
    """Milliseconds of processor time, the least of interleaved runs.

    Raises:
        RuntimeError: the two results deviate.
    """
    run = lower(capture(function, *arguments), platform="cpu")
    jitted = jax.jit(lambda arrays: run(arrays, None), compiler_options=options)
    arrays = [jax.device_put(np.asarray(argument)) for argument in arguments]
    expected = function(*arguments)
    deviation = torch.from_numpy(np.array(jax.tree.leaves(jitted(arrays))[0])).sub(expected).abs().max() / expected.abs().max()
    if not deviation < 1e-4:
        raise RuntimeError(f"benchmark convolutions: {deviation:.1e} beside torch's result")
    lanes = {"torch": lambda: function(*arguments), "xla": lambda: jax.block_until_ready(jitted(arrays))}
    times: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(repetitions):
        for name, lane in lanes.items():
            began = time.process_time()
            lane()
            times[name].append(time.process_time() - began)
    return {name: 1e3 * min(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    malloc.keep_freed()  # as in a Trainer
    options = compiler_options(make_mesh({"data": 1}))
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        if args.only in case.name:
            for direction, function in case.functions().items():
                found[f"{case.name}, {direction}"] = times = measure(*function, args.repetitions, options)
                ratio = times["xla"] / times["torch"]
                print(f"{case.name}, {direction}: {ratio:.2f} x, {times['xla']:.2f} / {times['torch']:.2f} ms", flush=True)
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
