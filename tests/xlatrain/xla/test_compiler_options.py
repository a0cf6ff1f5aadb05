"""Options of XLA:CPU: which library has convolutions, and an order that needs little memory; seen in compiled programs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import replicated
from xlatrain.xla import compiler_options as cpu_compiler
from xlatrain.xla.compiler_options import LARGE, compiler_options

pytestmark = pytest.mark.usefixtures("compiled_as_for_users")


def compiled(function: Callable[..., jax.Array], *shapes: tuple[int, ...], options: dict[str, str]) -> str:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function, compiler_options=options).lower(*args).compile().as_text()
    assert text is not None
    return text


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_convolutions_are_left_to_eigen_and_products_to_ynnpack() -> None:
    options = compiler_options(make_mesh({"data": 1}, devices=jax.devices()[:1]))
    image, kernel = (32, 32, 32, 32), (3, 3, 32, 32)
    assert "ynn_fusion" in compiled(convolve, image, kernel, options={}), "YNNPACK has no convolutions here: drop the option"
    assert "ynn_fusion" not in compiled(convolve, image, kernel, options=options)
    assert "ynn_fusion" in compiled(jnp.matmul, (512, 512), (512, 512), options=options)


def test_a_flag_of_the_user_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh({"fsdp": 2}, devices=jax.devices()[:2])
    library, order = compiler_options(mesh, LARGE - 1)
    monkeypatch.setenv("XLA_FLAGS", f"--{library}=")
    assert list(compiler_options(mesh)) == [order]
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=algsimp")
    assert list(compiler_options(mesh, LARGE)) == [library, order]
    monkeypatch.setenv("XLA_FLAGS", f"--{library}= --{order}=CPU_SCHEDULER_TYPE_DEFAULT")
    assert compiler_options(mesh) == {}


def test_a_jaxlib_without_a_flag_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_compiler, "_LIBRARIES", ("xla_cpu_no_such_flag", "1"))
    assert compiler_options(make_mesh({"data": 1}, devices=jax.devices()[:1])) == {}


def test_sharded_products_are_gathered_one_after_the_other() -> None:
    """Eight weights, split over two devices: one is whole at a time, not all of them."""
    mesh = make_mesh({"fsdp": 2}, devices=jax.devices()[:2])
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=split)] * 8
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=split)

    def products(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(jax.lax.with_sharding_constraint(x, split) @ jax.lax.with_sharding_constraint(weight, replicated(mesh)))
        return x

    found = jax.jit(products, compiler_options=compiler_options(mesh)).lower(x, weights).compile().memory_analysis()
    assert found is not None
    assert found.temp_size_in_bytes < 2.5 * 256 * 256 * 4


def test_large_gradients_are_summed_one_after_the_other() -> None:
    """A single gradient of six split parameters is whole at a time, and its sum; in one collective all would be, twice."""
    mesh = make_mesh({"fsdp": 2}, devices=jax.devices()[:2])
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=split)] * 6
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=split)

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for param in params:
            whole = jax.lax.with_sharding_constraint(param, replicated(mesh))
            x = jnp.tanh(jax.lax.with_sharding_constraint(x @ whole, split))
        return x.sum()

    def step(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return [param - grad for param, grad in zip(params, jax.grad(loss)(params, x), strict=True)]

    def temporaries(gradient_bytes: int) -> float:
        options = compiler_options(mesh, gradient_bytes)
        program = jax.jit(step, donate_argnums=0, out_shardings=[split] * 6, compiler_options=options)
        found = program.lower(params, x).compile().memory_analysis()
        assert found is not None
        return found.temp_size_in_bytes / (256 * 256 * 4)

    assert temporaries(LARGE) < 6 / 2 + 2.5  # the shards' gradients
    assert temporaries(0) > 10, "XLA:CPU no longer sums all gradients at once: drop the option"
