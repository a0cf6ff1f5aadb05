"""Preflight of pure JAX steps and of engines: on the CPUs of this machine as they then run, and for every generation of TPUs."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from xlatrain.host.libtpu_environment import ENVIRONMENT
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import ShardingRules
from xlatrain.preflight import Topology, preflight_engine, preflight_step
from xlatrain.step.engine import Engine

pytestmark = pytest.mark.usefixtures("compiled_as_for_users")

OPTIMIZER = optax.adamw(1e-3)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def init() -> dict[str, Any]:
    return {"in": {"w": jnp.ones((64, 512)), "b": jnp.zeros(512)}, "out": jnp.ones((512, 64))}


def step(params: Any, opt_state: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
    def loss(p: Any) -> jax.Array:
        return jnp.mean((jax.nn.gelu(batch @ p["in"]["w"] + p["in"]["b"]) @ p["out"] - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


PARAMS: Any = jax.eval_shape(init)
STATE: Any = jax.eval_shape(OPTIMIZER.init, PARAMS)
BATCH = jax.ShapeDtypeStruct((64, 64), jnp.float32)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a, self.b = nnx.Linear(64, 512, rngs=rngs), nnx.Linear(512, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(nnx.gelu(self.a(x)))


def loss_of(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch) - batch) ** 2)


def here(tree: Any) -> int:
    """Bytes on the first device."""
    first = jax.devices()[0]
    shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == first]
    return sum(shard.data.nbytes for shard in shards)


def test_a_pure_step(tmp_path: Path) -> None:
    report = preflight_step(step, PARAMS, STATE, BATCH, topology="cpu:8", output=tmp_path, store=True)
    assert report.fits and report.mesh == {"data": 1, "fsdp": 8} and report.parameters == 64 * 512 * 2 + 512
    split = (64 * 512 * 2) * 4 // 8 + 512 * 4  # the bias is too small to be split
    sizes = report.bytes_per_chip
    assert (sizes["parameters"], sizes["optimizer"], sizes["batch"]) == (split, 2 * split + 4, 8 * 64 * 4)
    assert {one.path for one in report.largest[:2]} == {"in.w", "out"} and "all-gather" in report.collectives["fsdp"]
    text = gzip.decompress((tmp_path / "programs" / "train.stablehlo.mlir.gz").read_bytes()).decode()
    assert "stablehlo.dot_general" in text and (tmp_path / "plan.json").exists()
    with pytest.raises(ValueError, match=r"batch leaf 'x' has 60 rows, which the mesh splits into 8 parts"):
        preflight_step(step, PARAMS, STATE, {"x": jax.ShapeDtypeStruct((60, 64), jnp.float32)}, topology="cpu:8")
    with pytest.raises(ValueError, match=r"has to return \(params, opt_state, …\)"):
        preflight_step(lambda p, s, b: p, PARAMS, STATE, BATCH, topology="cpu:8")
    with pytest.raises(ValueError, match="need 4 devices, but there are 8"):
        preflight_step(step, PARAMS, STATE, BATCH, topology="cpu:8", axes={"fsdp": 4})


def test_an_engine_takes_what_was_predicted() -> None:
    pod = Topology.parse("cpu:8")
    engine = Engine(Model, OPTIMIZER, mesh=make_mesh({"data": 2, "fsdp": 4}, pod.devices()), accumulate=2)
    report = preflight_engine(engine, loss_of, BATCH, topology=pod)
    state = engine.init()
    assert report.bytes_per_chip["parameters"] == here(state.params)
    assert report.bytes_per_chip["optimizer"] == here(state.opt_state)
    assert report.flops_per_step == 5 * 2 * 64 * 64 * 512
    with pytest.raises(ValueError, match=r"mesh has 8 cpu devices, cpu:4 has 4 of cpu"):
        preflight_engine(engine, loss_of, BATCH, topology=Topology.parse("cpu:4"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slices", "axes"),
    [
        ("v4:2x2x2", 1, {"fsdp": 8}),
        ("v6e:4x4", 1, {"fsdp": 8, "tensor": 2}),  # 2 is a part of a side of the torus
        ("v6e:2x2", 2, {"data": 2, "fsdp": 4}),
        ("tpu7x:2x2x1", 1, {"fsdp": 4, "tensor": 2}),
    ],
)
def test_every_generation_compiles(name: str, slices: int, axes: dict[str, int]) -> None:
    rules = ShardingRules((("in.w", PartitionSpec("fsdp", "tensor")), ("out", PartitionSpec("tensor", "fsdp"))))
    chosen = rules if "tensor" in axes else None
    report = preflight_step(step, PARAMS, STATE, BATCH, topology=name, num_slices=slices, axes=axes, rules=chosen)
    assert report.fits and report.mesh == axes and report.estimate is not None and report.steps[0].cycles > 0
    assert report.collectives.keys() >= {axis for axis in axes if axis != "data"} | ({"dcn"} if slices > 1 else set())
    assert report.bytes_per_chip["total"] < 2**22 < report.bytes_per_chip["hbm"]


@pytest.mark.parametrize(("topology", "times"), [("v5e:2x2", 2), ("v4:2x2x1", 1)])
def test_products_of_int8_take_the_time_of_the_chip(topology: str, times: int) -> None:
    def multiply(params: jax.Array, state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = jax.lax.dot(batch.astype(jnp.int8), params.astype(jnp.int8), preferred_element_type=jnp.int32)
        return params, product.astype(jnp.float32) + state

    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    found = preflight_step(multiply, square, square, square, topology=topology).estimate
    assert found is not None
    peak = {"v5e:2x2": 197e12, "v4:2x2x1": 275e12}[topology]
    of_all = 2 * 1024**3 / peak / times
    assert found.compute_seconds == pytest.approx(of_all / 4)  # as traced, on four chips
    assert sum(region["compute"] for region in found.regions.values()) == pytest.approx(of_all / 4)  # as compiled
    assert any("products in int8, 100% of the FLOPs" in text and f"at {times} times" in text for text in found.assumptions)


@pytest.mark.parametrize(("precision", "told"), [("highest", "6.0 on average here"), ("default", None)])
def test_products_in_float32_are_told(precision: str, told: str | None) -> None:
    def multiply(params: jax.Array, state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return params, jax.lax.dot(batch, params, precision=precision) + state

    square = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    found = preflight_step(multiply, square, square, square, topology="v5e:2x2").estimate
    assert found is not None and any(" on average here" in text for text in found.assumptions) == (told is not None)
    assert told is None or any(told in text for text in found.assumptions)
