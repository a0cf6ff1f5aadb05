"""Large gradients of split parameters are summed as they are kept: the same numbers, less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import make_mesh
from xlatrain.xla.compiler_options import LARGE, compiler_options
from xlatrain.xla.passes import gathering, reduce_scatters
from xlatrain.xla.passes.apply import apply_jaxpr_passes

pytestmark = pytest.mark.usefixtures("compiled_as_for_users")

WIDTH, ROWS, LAYERS = 64, 32, 3
BATCH = PartitionSpec(("data", "fsdp"))
FIRST, SECOND, BOTH = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp"), PartitionSpec(("data", "fsdp"))
MESHES = [({"fsdp": 8}, False), ({"data": 2, "fsdp": 4}, False), ({"data": 2, "fsdp": 4, "tensor": 1}, True)]
"""Axes, and whether the devices are taken for those of several processes."""


def stacked(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda y, one: (jax.checkpoint(lambda y, one: jnp.tanh(y @ one))(y, one), None), x, w)[0]


def tied(x: jax.Array, w: jax.Array) -> jax.Array:
    """A table's rows, and the table as output head."""
    return (x + w[jnp.arange(x.shape[0]) % 7]) @ w


def experts(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("bi,eio->beo", x, w).sum(1)


# name → a product, its weight's shape and how that is split, and how many reduce-scatters its gradient needs
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], PartitionSpec, int]] = {
    "matmul": (jnp.matmul, (WIDTH, WIDTH), FIRST, 1),
    "second dim": (jnp.matmul, (WIDTH, WIDTH), SECOND, 1),
    "both axes": (jnp.matmul, (WIDTH, WIDTH), BOTH, 1),
    "transposed": (lambda x, w: x @ w.T, (WIDTH, WIDTH), FIRST, 1),
    "rows of sequences": (lambda x, w: jnp.einsum("bti,io->bto", x[:, None], w)[:, 0], (WIDTH, WIDTH), SECOND, 1),
    "tied": (tied, (WIDTH, WIDTH), FIRST, 1),
    "experts": (experts, (8, WIDTH, WIDTH), FIRST, 1),
    "16 bits": (lambda x, w: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype), (WIDTH, WIDTH), FIRST, 1),
    "stack": (stacked, (LAYERS, WIDTH, WIDTH), PartitionSpec(None, "fsdp"), 1),
    "branch": (lambda x, w: jax.lax.cond(x[0, 0] > 9, lambda: x @ w * 2, lambda: x @ w), (WIDTH, WIDTH), FIRST, 1),
    "replicated": (jnp.matmul, (WIDTH, WIDTH), PartitionSpec(), 0),
}


def step_of(product: Callable[..., Any], sharding: NamedSharding) -> Callable[..., Any]:
    """An update of momentum and weights, each constrained in the end; the loss is given back, too."""

    def step(state: Any, x: jax.Array) -> Any:
        w, momentum = state
        loss, grad = jax.value_and_grad(lambda w: jnp.square(product(x, w)).mean())(w)
        norm = jnp.sqrt(jnp.square(grad).sum())
        momentum = 0.9 * momentum + jnp.where(norm > 1, grad / norm, grad)
        return jax.lax.with_sharding_constraint((w - momentum, momentum), (sharding, sharding)), loss

    return step


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient is large, and summed in four pieces or more."""
    monkeypatch.setattr(reduce_scatters, "LARGE", 0)
    monkeypatch.setattr(reduce_scatters, "PIECE", WIDTH * WIDTH)


def given(mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec, rows: int = ROWS) -> tuple[NamedSharding, Any]:
    rng = np.random.default_rng(0)
    sharding = NamedSharding(mesh, spec)
    state = jax.device_put(tuple(rng.normal(size=shape).astype(np.float32) / 8 for _ in "wm"), sharding)
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    return sharding, (state, jax.device_put(x, NamedSharding(mesh, BATCH if rows % mesh.size == 0 else PartitionSpec())))


def collectives(jaxpr: Any) -> int:
    return str(jaxpr).count("reduce_scatter[") + str(jaxpr).count("all_to_all[")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("axes", "multiprocess"), MESHES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_numbers(name: str, axes: dict[str, int], multiprocess: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of an update with momentum, clipped; between processes by all-to-all, which one process can do as well."""
    monkeypatch.setattr(reduce_scatters, "is_multiprocess", lambda mesh: multiprocess)
    mesh = make_mesh({"data": 1, **axes})
    product, shape, spec, expected = PRODUCTS[name]
    sharding, args = given(mesh, shape, spec)
    step = step_of(product, sharding)
    function = apply_jaxpr_passes(step, lambda state: (sharding, sharding))
    (found, loss), (plain, plain_loss) = jax.jit(function)(*args), jax.jit(step)(*jax.device_get(args))
    assert (collectives(jax.make_jaxpr(function)(*args)) > 0) == expected
    for got, wanted in zip(found, plain, strict=True):
        assert got.sharding.is_equivalent_to(sharding, got.ndim)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-3 if name == "16 bits" else 1e-6)
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-2 if name == "16 bits" else 1e-6)


@pytest.mark.parametrize(
    ("axes", "rows", "large"),
    [({"fsdp": 4, "tensor": 2}, ROWS, 0), ({"fsdp": 8}, 12, 0), ({"fsdp": 8}, ROWS, 4 * WIDTH * WIDTH + 1)],
    ids=["another axis", "rows that do not divide", "small"],
)
def test_what_is_left_alone(axes: dict[str, int], rows: int, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_scatters, "LARGE", large)
    mesh = make_mesh({"data": 1, **axes})
    sharding, args = given(mesh, (WIDTH, WIDTH), FIRST, rows)
    assert (
        collectives(jax.make_jaxpr(apply_jaxpr_passes(step_of(jnp.matmul, sharding), lambda state: (sharding, sharding)))(*args))
        == 0
    )


@pytest.mark.usefixtures("small")
def test_products_of_an_update_are_left_alone() -> None:
    """Muon's iterations multiply what is split like a parameter."""
    sharding, args = given(make_mesh({"data": 1, "fsdp": 8}), (WIDTH, 2 * WIDTH), FIRST)

    def step(state: Any, x: jax.Array) -> Any:
        w, momentum = state
        grad = jax.grad(lambda w: jnp.square(x @ w).mean())(w)
        for _ in range(3):
            grad = 1.5 * grad - 0.5 * (grad @ grad.T) @ grad
        return jax.lax.with_sharding_constraint((w - grad, momentum + grad), (sharding, sharding))

    jaxpr = str(jax.make_jaxpr(apply_jaxpr_passes(step, lambda state: (sharding, sharding)))(*args))
    assert jaxpr.count("shard_map[") == 1


def temporaries(function: Callable[..., Any], args: Any, mesh: Mesh) -> int:
    options = compiler_options(mesh, LARGE)
    found = jax.jit(function, donate_argnums=0, compiler_options=options).lower(*args).compile().memory_analysis()
    assert found is not None
    return found.temp_size_in_bytes


def test_memory_of_a_large_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single piece is there at a time; XLA's sum is whole before and after."""
    mesh, (vocabulary, width) = make_mesh({"data": 1, "fsdp": 8}), (4096, 512)
    sharding, split = NamedSharding(mesh, FIRST), NamedSharding(mesh, BATCH)
    w = jax.ShapeDtypeStruct((vocabulary, width), jnp.float32, sharding=sharding)
    x, cotangent = (jax.ShapeDtypeStruct((ROWS, size), jnp.float32, sharding=split) for size in (width, vocabulary))
    monkeypatch.setattr(reduce_scatters, "PIECE", vocabulary * width * 4 // 8)

    def step(w: jax.Array, x: jax.Array, cotangent: jax.Array) -> Any:
        grad = jax.grad(lambda w: (cotangent * (x @ w.T)).sum())(w)
        return jax.lax.with_sharding_constraint(w - grad, sharding)

    args, whole = (w, x, cotangent), vocabulary * width * 4
    assert temporaries(apply_jaxpr_passes(step, lambda w: sharding), args, mesh) < 0.6 * whole
    assert temporaries(step, args, mesh) > 1.9 * whole, "XLA:CPU no longer sums the gradient whole: drop the rewriting"


def test_16_bit_parameters_are_gathered_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the bytes, in a loop too; the numbers are the same to the bit."""
    monkeypatch.setattr(gathering, "LARGE", 0)
    mesh = make_mesh({"data": 1, "fsdp": 8})
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    rng = np.random.default_rng(0)
    w = jax.device_put((rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 8).astype(jnp.bfloat16), sharding)
    x = jax.device_put(rng.normal(size=(ROWS, WIDTH)).astype(jnp.bfloat16), NamedSharding(mesh, BATCH))
    compiled = jax.jit(apply_jaxpr_passes(lambda w, x: stacked(x, w), lambda w: sharding)).lower(w, x).compile()
    gathers = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
    assert gathers
    assert all(" u16[" in line for line in gathers)
    np.testing.assert_array_equal(compiled(w, x), jax.jit(lambda w, x: stacked(x, w))(*jax.device_get((w, x))))
