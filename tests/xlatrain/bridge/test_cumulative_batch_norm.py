"""Batch norm whose running statistics are means over all batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.utils.stateless import _reparametrize_module

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower


def test_statistics_over_three_batches() -> None:
    layer, reference = torch.nn.BatchNorm2d(3, momentum=None), torch.nn.BatchNorm2d(3, momentum=None)
    names = ("running_mean", "running_var", "num_batches_tracked")

    def step(x: torch.Tensor, *buffers: torch.Tensor) -> list[torch.Tensor]:
        with _reparametrize_module(layer, dict(zip(names, buffers, strict=True))):
            return [layer(x), *buffers]

    state = [getattr(reference, name).clone() for name in names]
    run = lower(capture(step, torch.empty(4, 3, 2, 2), *state))
    program = jax.jit(lambda *inputs: run([*inputs], None))
    arrays = [jnp.asarray(tensor.numpy()) for tensor in state]
    for seed in range(3):
        x = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
        output, *arrays = program(jnp.asarray(x.numpy()), *arrays)
        np.testing.assert_allclose(output, reference(x).detach(), rtol=2e-5, atol=2e-6)
        for name, array in zip(names, arrays, strict=True):
            np.testing.assert_allclose(array, getattr(reference, name), rtol=2e-6, err_msg=name)
