"""Gradients of grouped convolutions by their kernels: XLA's partitioner gets them wrong, and not as contractions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import ShardingRules
from xlatrain.step.engine import Engine
from xlatrain.xla.passes.batch_groups import without_batch_groups

pytestmark = pytest.mark.usefixtures("compiled_as_for_users")


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("layout", "x", "kernel", "options"),
    [
        ("C", (4, 11, 6), (3, 2, 9), {"feature_group_count": 3}),
        ("C", (4, 7, 6), (5, 1, 6), {"feature_group_count": 6, "padding": [(3, 1)], "rhs_dilation": (2,)}),
        ("C", (4, 6, 6), (6, 1, 6), {"feature_group_count": 6}),  # more positions in the result than in the gradient
        ("C", (4, 9, 10, 4), (3, 2, 2, 8), {"feature_group_count": 2, "window_strides": (2, 3)}),
        ("C", (2, 5, 4, 4), (3, 2, 2, 4), {"feature_group_count": 2, "lhs_dilation": (2, 1)}),
        ("S", (4, 6, 8, 7), (6, 3, 3, 3), {"feature_group_count": 2, "padding": "SAME"}),
        ("C", (2, 5, 4, 6, 4), (3, 2, 1, 1, 4), {"feature_group_count": 4}),
        ("C", (6, 9, 4), (3, 4, 6), {"batch_group_count": 3}),
        ("C", (4, 11, 6), (3, 1, 6), {"feature_group_count": 6, "preferred_element_type": "bfloat16"}),
        ("C", (4, 6, 6), (6, 1, 6), {"feature_group_count": 6, "preferred_element_type": "bfloat16"}),
    ],
)
def test_contractions_are_convolutions(layout: str, x: tuple[int, ...], kernel: tuple[int, ...], options: Any) -> None:
    """The result and the gradients, in and outside of a loop; tolerance 2e-5 of the largest, bfloat16 2e-2."""
    spatial = "DHW"[-(len(x) - 2) :]
    numbers = (
        (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}") if layout == "S" else (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    )
    dtype = options.get("preferred_element_type", "float32")
    options = {"window_strides": (1,) * len(spatial), "padding": [(0, 0)] * len(spatial), **options}

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        out = jax.lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options)
        looped, _ = jax.lax.scan(lambda y, one: (y + jnp.sin(out * one), None), out, jnp.arange(2).astype(dtype))
        return looped.astype(jnp.float32).sum()

    arguments = (jnp.asarray(floats(*x), dtype), jnp.asarray(floats(*kernel), dtype))
    gradients = jax.value_and_grad(loss, (0, 1))
    contracted = without_batch_groups(gradients, make_mesh({"data": 8}))
    groups = max(options.get(kind, 1) for kind in ("feature_group_count", "batch_group_count"))
    convolutions = [str(jax.make_jaxpr(function)(*arguments)) for function in (gradients, contracted)]
    assert [f"batch_group_count={groups}" in text for text in convolutions] == [True, False]
    for found, expected in zip(*map(jax.tree.leaves, (contracted(*arguments), gradients(*arguments))), strict=True):
        assert found.dtype == expected.dtype
        found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
        tolerance = 2e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_a_shard_map_that_leaves_axes_to_the_partitioner() -> None:
    """Over ``tensor`` alone. One over all axes is left alone."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})

    def halved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x = jnp.tanh(x.reshape(2, -1, *x.shape[1:]).mean(0))
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8)

    def gradient(names: set[str]) -> Any:
        mapped = jax.shard_map(halved, mesh=mesh, in_specs=(P(), P()), out_specs=P(), axis_names=names)
        return jax.grad(lambda x, kernel: jnp.tanh(mapped(x, kernel)).sum(), argnums=1)

    x, kernel = floats(8, 6, 6, 8), floats(3, 3, 1, 8)
    split = jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp")))), jax.device_put(kernel, NamedSharding(mesh, P()))
    found = jax.jit(without_batch_groups(gradient({"tensor"}), mesh))(*split)
    expected = jax.grad(lambda kernel: jnp.tanh(halved(x, kernel)).sum())(kernel)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    alone = without_batch_groups(gradient({"data", "fsdp", "tensor"}), mesh)
    assert "batch_group_count=8" in str(jax.make_jaxpr(alone)(x, kernel))


class Net(nnx.Module):
    """A depthwise convolution, and one by groups after the batch became smaller."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.second = nnx.Conv(8, 8, (3, 3), strides=2, feature_group_count=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        frames = nnx.tanh(self.first(x))
        return self.second(frames.reshape(-1, 2, *frames.shape[1:]).mean(1))


def trained(axes: dict[str, int], accumulate: int) -> Any:
    """Parameters after a step, and the gradient that an evaluation takes."""
    mesh = make_mesh(axes, jax.devices()[:1] if axes == {"data": 1} else None)
    engine = Engine(Net, optax.sgd(1.0), mesh=mesh, rules=ShardingRules(min_size=1), accumulate=accumulate)
    x = floats(32, 6, 6, 8)

    def loss(model: Net, x: jax.Array) -> jax.Array:
        return jnp.square(model(x)).mean()

    state, output = engine.compile_train_step(loss)(engine.init(), x)
    gradient = engine.compile_eval_step(lambda model, x: nnx.state(nnx.grad(loss)(model, x)))(state, x)
    return jax.tree.map(np.asarray, (state.params, output.loss, output.grad_norm, nnx.to_pure_dict(gradient)))


@pytest.mark.parametrize(("axes", "accumulate"), [({"data": 2, "tensor": 4}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 2)])
def test_the_engine(axes: dict[str, int], accumulate: int) -> None:
    """The engine gives what one device gives. XLA's gradients were twice and four times as large; tolerance 1e-5."""
    found, expected = trained(axes, accumulate), trained({"data": 1}, accumulate)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), found, expected)
