"""Single ops of the GPT and the CNN: torch's, and XLA's as the lowerings have them; processor time of one core.

Pin the process to one core (``taskset -c 0``): processor time of one thread does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"

import jax
import numpy as np
import torch
import torch.nn.functional as F

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower
from xlatrain.host import malloc

Function = Callable[..., Any]
RNG = torch.Generator().manual_seed(0)
MATMULS = ((1024, 256, 768), (1024, 256, 256), (1024, 256, 1024), (1024, 1024, 256), (256, 1024, 1024))
BATCHED = ((64, 128, 32, 128), (64, 128, 128, 32))
# samples, channels in, size, channels out, kernel, stride
CONVOLUTIONS = (
    (32, 3, 32, 32, 3, 1), (32, 32, 32, 32, 3, 1), (32, 32, 32, 64, 3, 2), (32, 64, 16, 64, 3, 1), (32, 64, 16, 128, 3, 2),
    (32, 128, 8, 128, 3, 1), (32, 32, 32, 64, 1, 2), (8, 256, 14, 64, 1, 1),
)  # fmt: skip


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=RNG)


def ops() -> dict[str, tuple[Function, tuple[torch.Tensor, ...]]]:
    """Name → function and its arguments."""
    found: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {}
    for m, k, n in MATMULS:
        found[f"x @ w.T [{m},{k}] [{n},{k}]"] = (lambda x, w: x @ w.t(), (normal(m, k), normal(n, k)))
    for b, m, k, n in BATCHED:
        found[f"bmm [{b},{m},{k}] [{b},{k},{n}]"] = (torch.bmm, (normal(b, m, k), normal(b, k, n)))
    found["softmax [8,8,128,128]"] = (lambda x: x.softmax(-1), (normal(8, 8, 128, 128),))
    found["gelu [1024,1024]"] = (F.gelu, (normal(1024, 1024),))
    found["gelu backward [1024,1024]"] = (torch.ops.aten.gelu_backward, (normal(1024, 1024), normal(1024, 1024)))
    found["layer_norm [1024,256]"] = (lambda x: F.layer_norm(x, (256,)), (normal(1024, 256),))
    for convolution in CONVOLUTIONS:
        found.update(directions(*convolution))
    return found


def directions(
    n: int, c_in: int, size: int, c_out: int, kernel: int, stride: int
) -> dict[str, tuple[Function, tuple[torch.Tensor, ...]]]:
    """A convolution, and its gradients by input and by weight."""
    x, weight, padding = normal(n, c_in, size, size), normal(c_out, c_in, kernel, kernel), kernel // 2
    grad = torch.empty_like(F.conv2d(x, weight, stride=stride, padding=padding)).normal_(generator=RNG)

    def backward(by_input: bool) -> Function:
        mask = [by_input, not by_input, False]

        def gradient(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            window = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
            return torch.ops.aten.convolution_backward(grad, x, weight, None, *window, mask)[0 if by_input else 1]

        return gradient

    name = f"conv [{n},{c_in},{size},{size}] to {c_out}, kernel {kernel}, stride {stride}"
    return {
        name: (lambda x, w: F.conv2d(x, w, stride=stride, padding=padding), (x, weight)),
        f"{name}, by input": (backward(True), (grad, x, weight)),
        f"{name}, by weight": (backward(False), (grad, x, weight)),
    }


def measure(function: Function, arguments: tuple[torch.Tensor, ...], repetitions: int) -> dict[str, float]:
    """Milliseconds of processor time, the lower quartile of interleaved runs."""
    run = lower(capture(function, *arguments))
    arrays = [jax.device_put(np.asarray(argument)) for argument in arguments]
    jitted = jax.jit(lambda arrays: run(arrays, None))
    lanes = {"torch": lambda: function(*arguments), "xla": lambda: jax.block_until_ready(jitted(arrays))}
    times: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(repetitions + 2):
        for name, lane in lanes.items():
            began = time.process_time()
            lane()
            times[name].append(time.process_time() - began)
    return {name: 1e3 * sorted(values[2:])[repetitions // 4] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    malloc.keep_freed()  # as in a Trainer
    args.out.write_text(json.dumps({name: measure(*op, args.repetitions) for name, op in ops().items()}))


if __name__ == "__main__":
    main()
