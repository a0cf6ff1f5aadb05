"""Layers on the stages of a mesh: the numbers of one device, and what cannot run so by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor

from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.lower.interpret import lower
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.pipelining import Pipelining
from xlatrain.preflight.hlo import Hlo
from xlatrain.step.stacking import Row, as_array, cut

LAYERS, WIDTH, LENGTH = 4, 8, 4
Block = Callable[[Tensor, Tensor], Tensor]


def captured(block: Block, rows: int = 8, layers: int = LAYERS) -> tuple[Capture, list[Tensor]]:
    """Loss and gradients of layers ``x (rows, LENGTH, WIDTH), weight (WIDTH, WIDTH) -> x``, and the values of the inputs."""
    rng = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=rng) / WIDTH**0.5 for _ in range(layers)]
    x = torch.randn(rows, LENGTH, WIDTH, generator=rng)

    def step(weights: list[Tensor], x: Tensor) -> list[Tensor]:
        leaves = [value.detach().requires_grad_() for value in (*weights, x)]
        with torch.enable_grad():
            y = leaves[-1].sin()
            for weight in leaves[:-1]:
                y = block(y, weight)
            loss = y.square().mean()
            return [loss, *torch.autograd.grad(loss, leaves)]

    return capture(step, weights, x), [*weights, x]


def with_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Attention by hand, heads cut out of one product, a row's own mask, a norm, dropout."""
    q, k, v = F.layer_norm(x @ weight, (WIDTH,)).view(-1, LENGTH, 2, WIDTH // 2).transpose(1, 2).repeat(1, 1, 1, 3).chunk(3, -1)
    seen = (torch.arange(x.shape[0]).view(-1, 1, 1, 1) % 3 + torch.arange(LENGTH)) > 0
    scores = (q @ k.transpose(-1, -2)).masked_fill(~seen, -1e9).softmax(-1)
    return x + F.dropout((scores @ v).transpose(1, 2).reshape(x.shape), 0.5)


def stacked_heads(x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of what is unbound puts rows of several tensors together."""
    a, b = torch.stack([x @ weight, x @ weight.t()], 2).unbind(2)
    return x + F.scaled_dot_product_attention(a[:, None], b[:, None], a[:, None], is_causal=True)[:, 0]


def routed(x: Tensor, weight: Tensor) -> Tensor:
    """The largest two scores of a token, written into a buffer of their own and read from it."""
    scores = (x @ weight).view(-1, WIDTH)
    values, index = scores.topk(2, -1)
    return x + scores.new_zeros(scores.shape).scatter(1, index, values.tanh()).view_as(x)


def on_stages(found: Capture, inputs: list[Tensor], pipelining: Pipelining, axes: dict[str, int]) -> tuple[list[Any], Any]:
    """The outputs, and the compiled program, on a mesh that splits stacked weights over stages and rows as batches are."""
    mesh = make_mesh(axes, jax.devices()[: int(np.prod(list(axes.values())))])
    run = lower(found, rolled=True, platform="cpu", partitioned=True, mesh=mesh, pipelining=pipelining)
    layers = len(inputs) - 1
    order = pipelining.order(layers)

    def program(stack: jax.Array, x: jax.Array, key: jax.Array) -> list[jax.Array]:
        rows: Any = [None] * layers
        for place, layer in enumerate(order):
            rows[layer] = Row(stack, place)
        return [as_array(value) for value in run([*rows, x], key)]

    stack = np.stack([inputs[layer].numpy() for layer in order])
    given = [
        jax.device_put(stack, NamedSharding(mesh, PartitionSpec("stage"))),
        jax.device_put(inputs[-1].numpy(), NamedSharding(mesh, PartitionSpec(("stage", "data")))),
    ]
    compiled = jax.jit(program).lower(*given, jax.random.key(3)).compile()
    return compiled(*given, jax.random.key(3)), Hlo(compiled.as_text(), mesh)


@pytest.mark.parametrize(
    ("block", "pipelining", "axes"),
    [
        pytest.param(with_heads, Pipelining(2, parts=2), {"stage": 2, "data": 2}, id="two-stages"),
        pytest.param(routed, Pipelining(2, parts=2), {"stage": 2, "data": 2}, id="routed"),
        pytest.param(stacked_heads, Pipelining(2, 2, 4, parts=1), {"stage": 2, "data": 1}, id="two-rounds"),
    ],
)
def test_stages_give_the_numbers_of_one_device(block: Block, pipelining: Pipelining, axes: dict[str, int]) -> None:
    found, inputs = captured(block)
    expected = jax.jit(lower(found))([jnp.asarray(value.numpy()) for value in inputs], jax.random.key(3))
    staged = found.staged(pipelining)
    assert len(staged.loops) == 2 and not staged.problem
    outputs, hlo = on_stages(found, inputs, pipelining, axes)
    for one, other in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    rows, microbatches = 8, pipelining.microbatches_of(8)
    ticks = pipelining.ticks(microbatches)
    sent = [one for one in hlo.collectives() if one.kind == "collective-permute" and one.axes == ("stage",) and one.count > 1]
    # what moves on and what is dealt out, each forward and backward, which have one place in the code
    assert [one.count for one in sent] == [2 * ticks] * 2
    assert {one.bytes for one in sent} == {rows // microbatches // axes["data"] * LENGTH * WIDTH * 4}


def test_rows_that_do_not_divide_run_in_fewer_microbatches() -> None:
    """The last batch of an epoch."""
    found, inputs = captured(lambda x, weight: torch.tanh(x @ weight), rows=3)
    expected = jax.jit(lower(found))([jnp.asarray(value.numpy()) for value in inputs], jax.random.key(3))
    pipelining = Pipelining(2, 2, 4)
    mesh = make_mesh({"stage": 2}, jax.devices()[:2])
    run = lower(found, rolled=True, platform="cpu", partitioned=True, mesh=mesh, pipelining=pipelining)
    arrays = [jnp.asarray(value.numpy()) for value in inputs]
    outputs = jax.jit(lambda *given: [as_array(value) for value in run(given, jax.random.key(3))])(*arrays)
    for one, other in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("block", "layers", "said"),
    [
        (lambda x, weight: (x - x.mean(0)) @ weight, 4, "mean in a layer does not treat the rows of a batch one by one"),
        (lambda x, weight: (x @ weight).flip(0), 4, "flip in a layer does not treat the rows of a batch one by one"),
        (lambda x, weight: x + (x @ weight).topk(2, 0).values.sum(0), 4, "topk in a layer does not treat the rows"),
        (lambda x, weight: torch.tanh(x @ weight).cumsum(0), 4, "in a layer does not treat the rows"),
        (lambda x, weight: x.transpose(0, 1).reshape(x.shape) @ weight, 4, "view in a layer does not treat the rows"),
        (lambda x, weight: torch.tanh(x @ weight), 6, "6 layers do not divide into 4 stages"),
        (lambda x, weight: torch.tanh(x @ weight), 1, "it has no 4 or more equal layers"),
    ],
)
def test_what_cannot_run_on_stages(block: Block, layers: int, said: str) -> None:
    assert said in captured(block, layers=layers)[0].staged(Pipelining(4)).problem


def test_schedule() -> None:
    one = Pipelining(stages=4, rounds=2, parts=2)
    assert one.order(16) == (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
    assert [one.microbatches_of(rows) for rows in (16, 128, 24, 6, 7)] == [8, 32, 12, 3, 7]
    assert one.bubble(8) == pytest.approx(3 / 19) and one.ticks(6) == 19


def test_a_member_that_was_cut_out_of_stages_is_there() -> None:
    """Many cuts in flight are more than XLA:CPU has threads for: it aborted at the 282nd state or the 612th."""
    mesh = make_mesh({"stage": 4, "data": 2})
    stack = jax.device_put(np.ones((4, 256, 256), np.float32), NamedSharding(mesh, PartitionSpec("stage", None, "data")))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, x: jnp.tanh(x @ x.mT), x))(stack)
    assert all(cut(slow, index).is_ready() for index in range(4))
