"""Repeated layers as loops: the same numbers as unrolled, and only where the graph is one of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xlatrain.bridge.capture.attention import float32_attention, fused_attention
from xlatrain.bridge.capture.capture import Capture, capture, record
from xlatrain.bridge.loops.rolling import copies_to_roll
from xlatrain.bridge.lower.interpret import lower
from xlatrain.step.stacking import Row, as_array

DEPTH, WIDTH = 5, 8
Block = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, x, weight of the layer, one of all layers) -> x``."""


@pytest.fixture(autouse=True)
def roll_from_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", "3")


def captured(block: Block, depth: int = DEPTH) -> tuple[Capture, list[Tensor]]:
    """Loss and every gradient of ``depth`` blocks, and the values of its inputs."""
    rng = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=rng) / WIDTH**0.5 for _ in range(depth)]
    x, shared = torch.randn(3, WIDTH, generator=rng), torch.randn(WIDTH, generator=rng)

    def step(weights: list[Tensor], shared: Tensor, x: Tensor) -> list[Tensor]:
        leaves = [value.detach().requires_grad_() for value in (*weights, shared)]
        with torch.enable_grad():
            y = x * leaves[-1]
            for layer in range(depth):
                y = block(layer, y, leaves[layer], leaves[-1])
            loss = y.square().mean()
            return [loss, *(grad for grad in torch.autograd.grad(loss, leaves, allow_unused=True) if grad is not None)]

    return capture(step, weights, shared, x), [*weights, shared, x]


def both(found: Capture, inputs: list[Tensor]) -> tuple[list[Any], list[Any]]:
    """The outputs unrolled, and rolled up with the weights given as one stack."""
    arrays = [jnp.asarray(value.numpy()) for value in inputs]
    key = jax.random.key(3)
    unrolled = jax.jit(lower(found))(arrays, key)

    def on_stack(stack: jax.Array, rest: list[jax.Array], key: jax.Array) -> list[jax.Array]:
        rows = [Row(stack, i) for i in range(stack.shape[0])]
        return [as_array(value) for value in lower(found, rolled=True)([*rows, *rest], key)]

    depth = len(arrays) - 2
    return unrolled, jax.jit(on_stack)(jnp.stack(arrays[:depth]), arrays[depth:], key)


def assert_same(rolled: Any, unrolled: Any) -> None:
    """To rounding: XLA fuses a loop's body in another way."""
    np.testing.assert_allclose(rolled, unrolled, rtol=2e-5, atol=1e-5 * np.abs(unrolled).max())


def with_skip(layer: int, x: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
    return x + F.gelu(x @ weight.t() + shared)


def with_tables_made_for_the_next(layer: int, x: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
    """Views of one table, each taken after its use, for the next layer, as a recomputation does it for rotary embeddings."""
    if layer == 0:
        TABLES[:] = [shared.detach().unsqueeze(0), shared.detach().unsqueeze(0)]
    y = torch.tanh(x @ weight) * TABLES[0]
    TABLES[0] = shared.detach().unsqueeze(0)
    y = torch.sin(y) + TABLES[1]
    TABLES[1] = shared.detach().unsqueeze(0)
    return y


TABLES: list[Tensor] = []


def attention(layer: int, x: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
    heads = (x @ weight).view(1, 1, 3, WIDTH)
    return x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).view(3, WIDTH)


def dropout_attention(layer: int, x: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
    heads = (x @ weight).view(1, 1, 3, WIDTH)
    with float32_attention():  # as one op
        return x + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).view(3, WIDTH)


BLOCKS: dict[str, Block] = {
    "a residual block": with_skip,
    "dropout": lambda layer, x, weight, shared: x + F.dropout(x @ weight, 0.5),
    "checkpointed": lambda layer, x, weight, shared: checkpoint(with_skip, layer, x, weight, shared, use_reentrant=False),
    "views of weights": lambda layer, x, weight, shared: x + F.linear(x[:, :4], weight.t()[:, :4]).tanh(),
    "the same in every layer": lambda layer, x, weight, shared: x + (x @ weight) * torch.arange(WIDTH).sin() * shared.exp(),
    "a constant in every layer": lambda layer, x, weight, shared: x + torch.tanh(x @ weight) * torch.tensor([0.5, 2.0] * 4),
    "attention": attention,
    "attention with dropout": dropout_attention,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_loop_gives_the_same_numbers(name: str) -> None:
    found, inputs = captured(BLOCKS[name])
    forward, backward = found.rolled.loops
    # the gradient of what all layers share is a sum from the second layer on
    assert forward.count == DEPTH and backward.count >= DEPTH - 1
    assert found.rolled.stacked_inputs() == [tuple(range(DEPTH))]
    for unrolled, rolled in zip(*both(found, inputs), strict=True):
        assert_same(rolled, unrolled)


def test_weights_that_are_stacked_are_scanned_as_they_are() -> None:
    """Nothing is put together again of what was cut out of their stack, for either loop."""
    found, inputs = captured(with_skip)
    arrays = [jnp.asarray(value.numpy()) for value in inputs]

    def on_stack(stack: jax.Array, rest: list[jax.Array]) -> list[Any]:
        values = lower(found, rolled=True)([*(Row(stack, i) for i in range(DEPTH)), *rest], None)
        return [value.stack if isinstance(value, Row) else value for value in values]

    program = str(jax.make_jaxpr(on_stack)(jnp.stack(arrays[:DEPTH]), arrays[DEPTH:]))
    assert " scan[" in program
    assert "concatenate[" not in program


@pytest.mark.usefixtures("compiled_as_for_users")
def test_loops_on_cpu_carry_16_bit_floats_as_integers() -> None:
    """The same bits; XLA:CPU would convert every stack to float32 and back in every iteration. Large ones without a copy."""
    weights = [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(DEPTH)]

    def step(weights: list[Tensor], x: Tensor) -> list[Tensor]:
        return [x := with_skip(0, x, weight, x[0]) for weight in weights]  # every layer's output, not only the last

    found = capture(step, weights, torch.ones(3, WIDTH, dtype=torch.bfloat16))
    inputs = (
        jnp.stack([jnp.asarray(weight.float().numpy(), jnp.bfloat16) for weight in weights]),
        jnp.ones((3, WIDTH), jnp.bfloat16),
    )

    def program(platform: str) -> Any:
        run = lower(found, rolled=True, platform=platform)
        return jax.jit(lambda stack, x: [as_array(y) for y in run([*(Row(stack, i) for i in range(DEPTH)), x], None)])

    text = program("cpu").lower(*inputs).compile().as_text()
    assert f"u16[{DEPTH},{WIDTH},{WIDTH}]" in text and f"f32[{DEPTH},{WIDTH},{WIDTH}]" not in text
    saving = {
        "xla_disable_hlo_passes": "while-loop-invariant-code-motion"
    }  # as xlatrain.xla.compiler_options has it for large models
    plain = {"xla_disable_hlo_passes": ""}
    temporaries = [
        program("cpu").lower(*inputs).compile(compiler_options=options).memory_analysis().temp_size_in_bytes
        for options in (saving, plain)
    ]
    assert temporaries[0] <= temporaries[1] - DEPTH * WIDTH * WIDTH * 2
    for on_cpu, elsewhere in zip(program("cpu")(*inputs), program("tpu")(*inputs), strict=True):
        assert on_cpu.dtype == jnp.bfloat16
        np.testing.assert_array_equal(on_cpu, elsewhere)


def test_layers_that_alternate_are_a_loop_over_pairs() -> None:
    def block(layer: int, x: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
        return x + (torch.tanh(x @ weight) if layer % 2 else torch.sigmoid(x @ weight.t()))

    found, inputs = captured(block, depth=8)
    assert [loop.count for loop in found.rolled.loops] == [4, 4]
    for unrolled, rolled in zip(*both(found, inputs), strict=True):
        assert_same(rolled, unrolled)


def test_every_layer_draws_what_it_draws_unrolled() -> None:
    found = capture(
        lambda weights, x: [x := F.dropout(x @ w, 0.5) for w in weights],  # every layer's output, not only the last
        [torch.eye(WIDTH)] * DEPTH + [torch.eye(WIDTH)],
        torch.ones(3, WIDTH),
    )
    inputs = [jnp.eye(WIDTH) * (1 + i) for i in range(len(found.inputs) - 1)]
    arguments = ([*inputs, jnp.ones((3, WIDTH))], jax.random.key(1))
    unrolled = jax.jit(lower(found))(*arguments)
    rolled = jax.jit(lambda *args: [as_array(value) for value in lower(found, rolled=True)(*args)])(*arguments)
    for a, b in zip(unrolled, rolled, strict=True):
        np.testing.assert_array_equal(a, b)
    masks = [np.asarray(a) == 0 for a in unrolled]
    assert found.rolled.loops and not np.array_equal(masks[0], masks[1])


class TwoBack:
    """A layer that uses the result of the layer before the one before: no loop with one carried value per result."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, layer: int, x: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
        self.seen = [] if layer == 0 else self.seen
        self.seen.append(x)
        return torch.tanh(x @ weight) + self.seen[max(layer - 2, 0)]


def test_what_is_no_loop_stays_unrolled_and_right() -> None:
    found, inputs = captured(TwoBack(), depth=6)
    for unrolled, rolled in zip(*both(found, inputs), strict=True):
        assert_same(rolled, unrolled)
    assert "used differently from copy to copy" in "".join(found.rolled.refused)


def test_layers_of_different_width_are_no_copies() -> None:
    net = nn.Sequential(*(nn.Linear(width, width + 1) for width in range(3, 8)))
    assert not capture(lambda x: net(x), torch.randn(2, 3)).rolled.loops


def test_too_few_layers_stay_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", str(DEPTH + 1))
    assert not captured(with_skip)[0].rolled.loops
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", "off")
    assert not captured(with_skip)[0].rolled.loops


@pytest.mark.parametrize("value", ["2", "on", "-3"])
def test_a_wrong_setting_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", value)
    with pytest.raises(ValueError, match=f"XLATRAIN_ROLL_LAYERS='{value}': expected 'off'"):
        copies_to_roll()


def test_what_each_copy_makes_anew_for_the_next_is_a_constant() -> None:
    found, inputs = captured(with_tables_made_for_the_next)
    TABLES.clear()
    assert not found.rolled.refused
    assert len(found.rolled.loops) == 2  # forward and backward
    for rolled, unrolled in zip(*reversed(both(found, inputs)), strict=True):
        assert_same(rolled, unrolled)


@pytest.mark.parametrize("window", [None, 2])
def test_ops_that_a_pass_rewrote_are_as_alike_as_before(window: int | None) -> None:
    """A mask is recognised in the layer that was captured and in those that are copies of it: the loop has them all."""

    def step(weights: list[Tensor], x: Tensor) -> list[Tensor]:
        places = torch.arange(3)
        seen = places <= places[:, None]
        seen = seen if window is None else seen & (places > places[:, None] - window)
        leaves = [value.detach().requires_grad_() for value in (x, *weights)]
        with torch.enable_grad():
            x = leaves[0]
            for weight in leaves[1:]:
                heads = (x @ weight).view(1, 1, 3, WIDTH)
                x = x + F.scaled_dot_product_attention(heads, heads, heads, seen).view(3, WIDTH)
            return [*torch.autograd.grad(x.square().mean(), leaves)]

    with fused_attention(), float32_attention():
        found = record(step, [torch.eye(WIDTH) for _ in range(DEPTH)], torch.ones(3, WIDTH)).graph()
    assert [loop.count for loop in found.rolled.loops] == [DEPTH, DEPTH]
