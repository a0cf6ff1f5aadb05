"""Collectives read from the text of compiled programs: of one that XLA:CPU compiles here, and of lines as TPUs have them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import make_mesh
from xlatrain.preflight import Step, compile_step, flops
from xlatrain.preflight.hlo import Hlo

TPU = """HloModule jit_f

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (input: f32[128,1024]) -> f32[128,256] {
  %input = f32[128,1024]{1,0:T(8,128)} parameter(0)
  %all-reduce.7 = f32[128,1024]{1,0} all-reduce(%input), channel_id=5, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %slice = f32[128,256]{1,0} dynamic-slice(%all-reduce.7, %i)
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %bound = s32[]{:T(128)} constant(32)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %gathered = bf16[256,64]{1,0} all-gather(%w), channel_id=8, replica_groups=[2,4]<=[8], dimensions={0}
  %fused = f32[128,256]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1, backend_config={"estimated_cycles":"10"}
}

%clone (p: f32[4]) -> f32[4] {
  %again = bf16[256,64]{1,0} all-gather(%w), channel_id=8, replica_groups=[2,4]<=[8], dimensions={0}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %loop = (s32[], f32[4]) while(%t), condition=%condition, body=%body
  %first = f32[4] fusion(%p), kind=kLoop, calls=%clone, backend_config={"estimated_cycles":"18446744073709551615"}
  %sum = f32[16]{0} all-reduce(%p), channel_id=9, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %turned = f32[8]{0} all-to-all(%p), channel_id=10, replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}
  %across = f32[4]{0} all-to-all(%p), channel_id=11, replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}
  %part = f32[2]{0} all-gather(%p), channel_id=12, replica_groups=mesh['a'=8] {'a':(1)2}, dimensions={0}
  %turn = f32[4]{0} collective-permute(%p), channel_id=13, source_target_pairs={{0,0},{1,5},{5,1}}
  %out = (f32[256,8]{1,0}, u32[], token[]) send(%b, %t), channel_id=2, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}"}
}
"""


def test_lines_of_a_tpu_program() -> None:
    """Clones count once, loops by their length, a fused all-reduce and slice as a reduce-scatter, sends between slices."""
    hlo = Hlo(TPU, make_mesh({"data": 2, "fsdp": 4}, jax.devices()))
    found = {(one.kind, one.axes, one.count, one.bytes) for one in hlo.collectives()}
    assert found == {
        ("all-gather", ("fsdp",), 32, 256 * 64 * 2),
        ("reduce-scatter", ("fsdp",), 32, 128 * 1024 * 4),
        ("all-reduce", ("data",), 1, 16 * 4),
        ("all-to-all", ("fsdp",), 1, 8 * 4),
        ("all-to-all", ("data",), 1, 4 * 4),
        ("all-gather", ("data",), 1, 2 * 4),
        ("collective-permute", ("data",), 1, 4 * 4),
        ("send", ("dcn",), 1, 256 * 8 * 4),
    }
    assert hlo.cycles() == 320


def test_a_program_of_this_machine() -> None:
    """Gradients under fsdp: weights are gathered, memory is that of the shards."""
    mesh = make_mesh({"fsdp": 8}, jax.devices())
    split = NamedSharding(mesh, PartitionSpec("fsdp"))

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w), None

        def loss(weights: jax.Array) -> jax.Array:
            return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)

        return weights - jax.grad(loss)(weights)

    over_dim_1 = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    weights = jax.ShapeDtypeStruct((5, 64, 64), jnp.float32, sharding=over_dim_1)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=split)
    found = compile_step(Step("train", jax.jit(step, donate_argnums=0), (weights, x)), mesh)
    assert found.memory is not None and found.memory.arguments == 5 * 64 * 8 * 4 + 2 * 64 * 4
    gathers = [one for one in found.collectives if one.kind == "all-gather"]
    assert gathers and all(one.axes == ("fsdp",) for one in gathers)
    assert {one.count for one in gathers} >= {5}
    # forward, gradient of the input, gradient of the weights: 2·16·64·64 each, 5 layers
    assert found.flops.total == 3 * 5 * 2 * 16 * 64 * 64


def test_flops_of_convolutions_and_passes() -> None:
    def f(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", precision=jax.lax.Precision.HIGHEST)

    jaxpr = jax.make_jaxpr(f)(np.zeros((2, 3, 8, 8), np.float32), np.zeros((4, 3, 3, 3), np.float32))
    found = flops.count(jaxpr)
    assert found.total == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)
    assert found.bf16_passes == 6 * found.total
