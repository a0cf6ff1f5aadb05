"""XLA's faults that passes over jaxprs are there for, in programs without xlatrain's passes.

A test that fails says that this jaxlib has no such fault any more: enter its release in ``MENDED_IN`` of
``xlatrain/xla/passes/__init__.py`` and run it with the oldest supported one too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.xlatrain.xla.passes.test_ordering import LAYERS, WIDTH, WORDS, beside_loops, layers, step_of
from xlatrain.mesh.mesh import make_mesh
from xlatrain.xla import passes
from xlatrain.xla.compiler_options import LARGE, compiler_options
from xlatrain.xla.passes.apply import apply_jaxpr_passes

pytestmark = pytest.mark.usefixtures("compiled_as_for_users")


def multiplies_wrongly() -> bool:
    """Gradients of two matrices over ``fsdp`` and ``tensor``, of rows over ``data`` and ``fsdp``."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    rng = np.random.default_rng(0)
    x, *weights = (rng.normal(size=(16, 16)).astype(np.float32) / 4 for _ in range(3))
    sharding = NamedSharding(mesh, P("fsdp", "tensor"))

    def gradients(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return jax.grad(lambda weights, x: jnp.square(jnp.tanh(x @ weights[0]) @ weights[1]).mean())(weights, x)

    split = jax.device_put(weights, sharding), jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"))))
    found = jax.jit(gradients, out_shardings=[sharding] * 2)(*split)
    return any(np.abs(a - b).max() > 1e-4 * np.abs(b).max() for a, b in zip(found, jax.jit(gradients)(weights, x), strict=True))


def gathers_16_bits_in_32() -> bool:
    mesh = make_mesh({"fsdp": 8})
    w = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    x = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    text = jax.jit(jnp.matmul).lower(x, w).compile().as_text()
    return re.search(r" f32\[\S* all-gather\(", text) is not None


def runs_collectives_beside_loops() -> bool:
    mesh = make_mesh({"fsdp": 4}, devices=jax.devices()[:4])
    specs = {"table": P("fsdp"), "stack": P(None, "fsdp"), "scale": P("fsdp"), "head": P("fsdp")}
    shapes = {"table": (WORDS, WIDTH), "stack": (LAYERS, WIDTH, WIDTH), "scale": (WIDTH,), "head": (WORDS, WIDTH)}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[name]) for name, shape in shapes.items()}
    tokens = jax.ShapeDtypeStruct((32,), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
    program = jax.jit(step_of(layers), out_shardings=(shardings, None)).lower(params, tokens)
    return bool(beside_loops(program.compile(compiler_options(mesh, LARGE)).as_text()))


def sums_gradients_whole() -> bool:
    mesh, (vocabulary, width) = make_mesh({"fsdp": 8}), (4096, 512)
    split = NamedSharding(mesh, P("fsdp"))
    w, x, cotangent = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split) for shape in ((vocabulary, width), (32, width), (32, vocabulary))
    )

    def step(w: jax.Array, x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: (cotangent * (x @ w.T)).sum())(w)

    compiled = jax.jit(step, donate_argnums=0, out_shardings=split).lower(w, x, cotangent).compile(compiler_options(mesh, LARGE))
    return compiled.memory_analysis().temp_size_in_bytes > 1.9 * vocabulary * width * 4


def sums_groups_of_the_batch_twice() -> bool:
    """The gradient of a depthwise convolution by its kernel, on a mesh with an axis over which rows are repeated."""
    mesh = make_mesh({"data": 2, "tensor": 4})
    x, kernel = (np.random.default_rng(0).integers(0, 3, shape).astype(np.float32) for shape in ((8, 6, 6, 8), (3, 3, 1, 8)))

    def gradient(x: jax.Array, kernel: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        conv = jax.lax.conv_general_dilated
        return jax.grad(lambda k: jnp.square(conv(x, k, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8)).sum())(
            kernel
        )

    split = (
        jax.device_put(x, NamedSharding(mesh, P("data"))),
        jax.device_put(kernel, NamedSharding(mesh, P(None, None, None, "tensor"))),
    )
    return not np.allclose(jax.jit(gradient)(*split), jax.jit(gradient)(x, kernel), rtol=1e-3)


FAULTS: dict[str, Callable[[], bool]] = {
    "batch_groups": sums_groups_of_the_batch_twice,
    "gathering": multiplies_wrongly,
    "16-bit gathering": gathers_16_bits_in_32,
    "ordering": runs_collectives_beside_loops,
    "reduce_scatters": sums_gradients_whole,
}


@pytest.mark.parametrize("name", passes.MENDED_IN)
def test_the_fault_is_there(name: str) -> None:
    assert FAULTS[name]() == passes.is_needed(name), "XLA has mended it, or broken it again: see the head of this file"


@pytest.mark.parametrize(("release", "needed"), [("0.10.2", True), ("0.12.0", False), ("0.12.1", False), ("0.12.0rc1", True)])
def test_a_pass_ends_with_the_release_that_is_mended(release: str, needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(passes.MENDED_IN, "ordering", "0.12.0")
    assert passes.is_needed("ordering", release) is needed


def test_no_pass_rewrites_where_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    sharding = NamedSharding(mesh, P("fsdp", "tensor"))

    def text() -> str:
        function: Any = apply_jaxpr_passes(lambda w, x: x @ w, lambda w: sharding)
        return str(jax.make_jaxpr(function)(jnp.ones((8, 8)), jnp.ones((8, 8))))

    assert "sharding_constraint" in text()
    monkeypatch.setitem(passes.MENDED_IN, "gathering", "0.1.0")
    assert "sharding_constraint" not in text()
