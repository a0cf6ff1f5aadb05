"""Compiler options, seen in compiled programs: XLA:CPU's libraries and an order that needs little memory; VMEM on TPUs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.host.libtpu_environment import ENVIRONMENT
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import replicated
from xlatrain.preflight import Topology
from xlatrain.preflight.costs import costs_of
from xlatrain.preflight.hlo import Hlo
from xlatrain.preflight.hlo_module import HloModule
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


@pytest.fixture
def tpu_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("tpu_environment")
def test_products_of_tpus_compute_what_is_fused_into_them_less_often() -> None:
    """The gradient by a gated layer's input: two products, an activation and its gradient in front of them."""
    mesh = make_mesh({"fsdp": 1}, devices=Topology.parse("v5e:1x1").devices())
    options = compiler_options(mesh)
    assert list(options) == ["xla_tpu_scoped_vmem_limit_kib"]

    def gradient(dh: jax.Array, g: jax.Array, u: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(g.astype(jnp.float32))
        by_gate = (dh * u * s * (1 + g * (1 - s))).astype(jnp.bfloat16)
        by_up = (dh * g * s).astype(jnp.bfloat16)
        return (by_gate @ w).astype(jnp.float32) + (by_up @ v).astype(jnp.float32)

    whole = replicated(mesh)
    shapes = [(4096, 14336)] * 3 + [(14336, 4096)] * 2
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in shapes]

    def cycles(options: dict[str, str]) -> int:
        text = jax.jit(gradient, compiler_options=options).lower(*args).compile().as_text()
        assert text is not None
        return sum(costs_of(HloModule(text)).cycles.values())

    assert cycles(options) < 0.9 * cycles({}), "libtpu's own limit is as good: drop the option"


VMEM = ["xla_tpu_scoped_vmem_limit_kib"]
GATHERS = ["xla_enable_async_all_gather", "xla_tpu_enable_async_collective_fusion_fuse_all_gather"]


@pytest.mark.usefixtures("tpu_environment")
@pytest.mark.parametrize(
    ("topology", "wanted"),
    [
        ("v4:2x2x1", GATHERS),
        ("v5e:2x2", VMEM),
        ("v5p:2x2x1", VMEM + GATHERS),
        ("v6e:2x2", VMEM + GATHERS),
        ("tpu7x:2x2x1", VMEM),
    ],
)
def test_options_of_each_tpu(topology: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set stands."""
    mesh = make_mesh({"fsdp": -1}, devices=Topology.parse(topology).devices())
    assert list(compiler_options(mesh)) == wanted
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " ".join(f"--{flag}=16384" for flag in wanted))
    assert compiler_options(mesh) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("tpu_environment")
def test_gathers_of_weights_go_on_beside_products() -> None:
    """Layers whose weights ``fsdp`` splits, on v5p."""
    mesh = make_mesh({"fsdp": 16, "tensor": 4}, devices=Topology.parse("v5p:4x4x4").devices())

    def layers(ws: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w[0]) @ w[1], None), x, ws)[0].sum()

    def given(*shape: int, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    up = given(4, 4096, 16384, spec=PartitionSpec(None, "fsdp", "tensor"))
    down = given(4, 16384, 4096, spec=PartitionSpec(None, "tensor", "fsdp"))
    x = given(16 * 4096, 4096, spec=PartitionSpec("fsdp"))

    def waited_for(options: dict[str, str]) -> int:
        text = jax.jit(layers, compiler_options=options).lower((up, down), x).compile().as_text()
        assert text is not None
        found = Hlo(text, mesh).collectives()
        return sum(one.count for one in found if one.kind == "all-gather" and not one.asynchronous)

    assert waited_for(compiler_options(mesh)) == 0
    assert waited_for({}) > 0, "libtpu no longer waits for gathers: drop the options"
