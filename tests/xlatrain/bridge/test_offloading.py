"""``save_on_cpu`` in a captured step: what is sent to host memory, what is not, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.capture.offloading import TO_DEVICE, TO_HOST
from xlatrain.bridge.lower.interpret import lower
from xlatrain.step.stacking import Row, as_array

DEPTH, ROWS, WIDTH = 5, 3, 8


def block(x: Tensor, weight: Tensor) -> Tensor:
    return x + torch.dropout(torch.tanh(x @ weight) @ weight, 0.5, True)


def on_host(x: Tensor, weight: Tensor) -> Tensor:
    with save_on_cpu():
        return block(x, weight)


made_before = save_on_cpu(pin_memory=True)


def recomputed_on_host(x: Tensor, weight: Tensor) -> Tensor:
    with made_before:
        return checkpoint(block, x, weight, use_reentrant=False)  # pyright: ignore[reportReturnType]


def reentrant_on_host(x: Tensor, weight: Tensor) -> Tensor:
    with save_on_cpu(pin_memory=True):
        return checkpoint(block, x, weight, use_reentrant=True)  # pyright: ignore[reportReturnType]


def captured(layer: Callable[[Tensor, Tensor], Tensor]) -> tuple[Capture, list[jax.Array]]:
    """Loss and gradients of ``DEPTH`` layers, and the values of its inputs."""
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn(WIDTH, WIDTH, generator=rng) for _ in range(DEPTH)]
    inputs += [torch.randn(ROWS, WIDTH, generator=rng), torch.randn(WIDTH, generator=rng)]

    def step(*given: Tensor) -> list[Tensor]:
        *weights, x, scale = (value.detach().requires_grad_() for value in given)
        x = x * scale
        for weight in weights:
            x = layer(x, weight)
        return [x.square().mean(), *torch.autograd.grad(x.square().mean(), weights)]

    return capture(step, *inputs), [jnp.asarray(value.numpy()) for value in inputs]


def sent(found: Capture) -> list[tuple[int, ...]]:
    """Shapes of what goes to host memory."""
    return [tuple(node.meta["val"].shape) for node in found.graph.graph.nodes if node.target is TO_HOST]


def run(found: Capture, inputs: list[jax.Array], *, rolled: bool) -> list[Any]:
    def function(weights: jax.Array, rest: list[jax.Array], key: jax.Array) -> list[Any]:
        stacked = [Row(weights, i) if rolled else weights[i] for i in range(DEPTH)]
        return [as_array(value) for value in lower(found, rolled=rolled)([*stacked, *rest], key)]

    return jax.jit(function)(jnp.stack(inputs[:DEPTH]), inputs[DEPTH:], jax.random.key(3))


@pytest.mark.parametrize(
    ("layer", "each"), [(on_host, 3), (recomputed_on_host, 1), (reentrant_on_host, 1)], ids=["saved", "remat", "reentrant"]
)
def test_activations_are_sent_and_weights_are_not(layer: Callable[[Tensor, Tensor], Tensor], each: int) -> None:
    """A layer sends its input, tanh and the dropout mask; its input alone where the rest is computed again."""
    plain, inputs = captured(block)
    found, _ = captured(layer)
    assert sent(plain) == []
    assert sent(found) == [(ROWS, WIDTH)] * each * DEPTH
    assert len(found.rolled.loops) == 2 and not plain.rolled.loops  # of five layers: without transfers they would stay unrolled
    expected = run(plain, inputs, rolled=False)
    for rolled in (False, True):
        for one, other in zip(run(found, inputs, rolled=rolled), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
    jaxpr = str(jax.make_jaxpr(lambda given: run(found, given, rolled=True))(inputs))
    assert f"f32<host>[{DEPTH},{ROWS},{WIDTH}]" in jaxpr


def test_what_is_on_the_device_anyway_stays_there() -> None:
    """Parameters, batches, their casts and views; what two ops save is sent once."""

    def step(weight: Tensor, x: Tensor) -> Tensor:
        weight = weight.detach().requires_grad_()
        with save_on_cpu():
            y = x.bfloat16() @ weight.bfloat16().t()
            z = y.sin() * y  # both save y
        return torch.autograd.grad(z.sum(), weight)[0]

    found = capture(step, torch.ones(WIDTH, WIDTH), torch.ones(ROWS, WIDTH))
    assert sent(found) == [(ROWS, WIDTH), (ROWS, WIDTH)]  # y and its sine
    back = [node for node in found.graph.graph.nodes if node.target is TO_DEVICE]
    assert len(back) == 3


def test_outside_of_a_capture_it_is_torchs_own() -> None:
    x = torch.ones(3, requires_grad=True)
    with save_on_cpu():
        x.sin().sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3).cos())
