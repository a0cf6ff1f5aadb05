"""Collectives read from the text of compiled programs: of one that XLA:CPU compiles here, and of lines as TPUs have them."""

from __future__ import annotations

import functools
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import make_mesh
from xlatrain.preflight import Step, compile_step
from xlatrain.preflight.estimate import passes
from xlatrain.preflight.hlo import Hlo
from xlatrain.xla import flops
from xlatrain.xla.flops import Flops

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
  %out = (f32[256,8]{1,0}, u32[], token[]) send(%b, %t), channel_id=2, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %parts = (f32[4]{0}, u32[], token[]) send(%b, %t), channel_id=3, frontend_attributes={_xla_megascale_target="{1,2,3,4}x{0:3}",\
_xla_megascale_transfer_type="ALL_GATHER"}
  %moved = (f32[8]{0}, u32[], token[]) send(%b, %t), channel_id=4, frontend_attributes={\
_xla_megascale_target={{100000,100001,200000,200001},{100002,100003,200002,200003}},_xla_megascale_transfer_type="ALL_TO_ALL"}
  %on = (f32[8]{0}, u32[], token[]) send(%b, %t), channel_id=6, frontend_attributes={\
_xla_megascale_target={{100000,200000},{200000,100000}},_xla_megascale_transfer_type="ONE_TO_ONE"}
}
"""


def test_lines_of_a_tpu_program() -> None:
    """Clones count once, loops by their length, a fused all-reduce and slice as a reduce-scatter, sends as what they begin."""
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
        ("all-reduce", ("dcn",), 1, 256 * 8 * 4),
        ("all-gather", ("dcn",), 1, 4 * 4 * 4),
        ("all-to-all", ("dcn",), 1, 8 * 4),
        ("collective-permute", ("dcn",), 1, 8 * 4),
    }
    sent = {one.kind: one.wire_bytes for one in hlo.collectives() if one.axes == ("dcn",)}
    assert sent == {"all-reduce": 256 * 8 * 4, "all-gather": 3 * 4 * 4, "all-to-all": 4 * 4, "collective-permute": 8 * 4}
    assert sum(hlo.costs().cycles.values()) == 320


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


def test_collectives_of_a_shard_map_are_told_apart() -> None:
    """They have one channel all together."""
    mesh = make_mesh({"expert": 8}, jax.devices())

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("expert"), out_specs=PartitionSpec("expert"))
    def there_and_back(rows: jax.Array) -> jax.Array:
        there = jax.lax.all_to_all(rows, "expert", 0, 0, tiled=True)
        return jax.lax.all_to_all(jnp.tanh(there * jax.lax.pmax(rows.max(), "expert")), "expert", 0, 0, tiled=True)

    text = there_and_back.lower(jax.ShapeDtypeStruct((64, 4), jnp.float32)).compile().as_text()
    kinds = Counter(one.kind for one in Hlo(text, mesh).collectives())
    assert kinds == {"all-to-all": 2, "all-reduce": 1}


def test_flops_of_convolutions_and_passes() -> None:
    def f(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", precision=jax.lax.Precision.HIGHEST)

    jaxpr = jax.make_jaxpr(f)(np.zeros((2, 3, 8, 8), np.float32), np.zeros((4, 3, 3, 3), np.float32))
    found = flops.count(jaxpr)
    assert found.total == 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)
    assert found.bf16_passes == 6 * found.total


def test_flops_of_a_shard_map_count_for_the_axes_that_it_takes() -> None:
    """A pipeline's stages are parts; over the other axes its arrays are whole."""
    mesh = make_mesh({"stage": 2, "fsdp": 4}, jax.devices())
    rows = PartitionSpec("stage")
    staged = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, axis_names={"stage"})
    assert flops.count(jax.make_jaxpr(staged)(jnp.zeros((8, 16)), jnp.zeros((16, 32)))).total == 2 * 8 * 16 * 32


def test_flops_of_grouped_products_and_their_gradients() -> None:
    def f(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.ragged_dot(rows, weights, sizes) ** 2)

    args = np.zeros((8, 4), np.float32), np.zeros((3, 4, 5), np.float32), np.array([2, 3, 3])
    assert flops.count(jax.make_jaxpr(jax.grad(f, (0, 1)))(*args)).total == 3 * 2 * 8 * 4 * 5


@pytest.mark.parametrize(("dtype", "kind"), [(jnp.int8, "int8"), (jnp.float8_e4m3fn, "float8"), (jnp.bfloat16, None)])
def test_products_of_eight_bits_are_told_apart(dtype: jnp.dtype, kind: str | None) -> None:
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        def body(carried: jax.Array, _: None) -> tuple[jax.Array, None]:
            return carried + jnp.matmul(x, y, preferred_element_type=carried.dtype), None

        return jax.lax.scan(body, jnp.zeros((8, 32), jnp.int32 if dtype == jnp.int8 else jnp.float32), None, length=3)[0]

    found = flops.count(jax.make_jaxpr(f)(jnp.zeros((8, 16), dtype), jnp.zeros((16, 32), dtype)))
    assert found.total == 3 * 2 * 8 * 16 * 32
    assert {name: getattr(found, name) for name in ("int8", "float8")} == {
        name: found.total if name == kind else 0 for name in ("int8", "float8")
    }


@pytest.mark.parametrize(("chip", "times"), [("TPU v5 lite", 2), ("TPU v6 lite", 2), ("TPU v4", 1)])
def test_int8_takes_the_time_of_the_chip(chip: str, times: int) -> None:
    device = SimpleNamespace(device_kind=chip)
    assert passes(Flops(10, 10, int8=6), device) == 10 - 6 + 6 / times


LOOPS = """HloModule jit_f

%condition (p: (u32[], bf16[8,128])) -> pred[] {
  %bound = u32[]{:T(128)} constant(6)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%fused (a: bf16[8,128], b: bf16[128,128]) -> bf16[8,128] {
  %a = bf16[8,128]{1,0} parameter(0)
  %b = bf16[128,128]{1,0} parameter(1)
  ROOT %product = bf16[8,128]{1,0} convolution(%a, %b), dim_labels=bf_io->bf, metadata={op_name="jit(f)/attention/dot_general"}
}

%sliced (a: bf16[64,128]) -> bf16[8,128] {
  %a = bf16[64,128]{1,0} parameter(0)
  ROOT %part = bf16[8,128]{1,0} dynamic-slice(%a, %i), dynamic_slice_sizes={8,128}
}

%step.clone (p: bf16[16,128]) -> bf16[16,128] {
  %own = bf16[2,128]{1,0} parameter(0)
  ROOT %part = bf16[16,128]{1,0} all-gather(%own), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
}

%begin.clone (p: bf16[16,128]) -> bf16[16,128] {
  %own = bf16[2,128]{1,0} parameter(0)
  ROOT %part = bf16[16,128]{1,0} all-gather(%own), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
}

%body (p: (u32[], bf16[8,128])) -> (u32[], bf16[8,128]) {
  %p = (u32[], bf16[8,128]{1,0}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %two = u32[]{:T(128)} constant(2)
  %next = u32[]{:T(128)} add(%i, %two)
  %x = bf16[8,128]{1,0} get-tuple-element(%p), index=1
  %w = bf16[128,128]{1,0:T(8,128)(2,1)S(1)} constant({...})
  %y = bf16[8,128]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused, metadata={op_name="jit(f)/attention/dot_general"}, \
backend_config={"estimated_cycles":"100"}
  %stepped = bf16[16,128]{1,0} fusion(%x), kind=kCustom, calls=%step.clone
  ROOT %state = (u32[], bf16[8,128]{1,0}) tuple(%next, %y)
}

ENTRY %main (p: bf16[64,128]) -> bf16[8,128] {
  %p = bf16[64,128]{1,0} parameter(0)
  %begun = bf16[16,128]{1,0} fusion(%p), kind=kCustom, calls=%begin.clone
  %x = bf16[8,128]{1,0} fusion(%p), kind=kLoop, calls=%sliced, metadata={op_name="jit(f)/optimizer/slice"}
  %t = (u32[], bf16[8,128]{1,0}) tuple(%zero, %x)
  %loop = (u32[], bf16[8,128]{1,0}) while(%t), condition=%condition, body=%body
  ROOT %out = bf16[8,128]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_costs_count_loops_and_only_what_is_read() -> None:
    """A u32 counter of steps of two, a weight in VMEM, a slice of a large operand, and a gather whose steps are in a loop."""
    hlo = Hlo(LOOPS, make_mesh({"fsdp": 8}, jax.devices()))
    costs = hlo.costs()
    assert costs.flops == {"attention": 3 * 2 * 8 * 128 * 128}
    assert costs.cycles == {"attention": 300}
    block = 8 * 128 * 2
    assert costs.traffic["attention"] == 3 * 2 * block
    assert costs.traffic["optimizer"] == 2 * block
    (gather,) = hlo.collectives()
    assert (gather.count, gather.bytes, gather.asynchronous) == (1, 16 * 128 * 2, True)


PEELED = """HloModule jit_f

%condition (p: s32[]) -> pred[] {
  %bound = s32[]{:T(128)} constant(6)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%begin.1 (p: bf16[2,128]) -> bf16[16,128] {
  %all = bf16[16,128]{1,0} all-gather(%own), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %call = bf16[16,128] custom-call(%all), custom_call_target="AsyncCollectiveStart"
}

%step.1 (p: bf16[2,128]) -> bf16[16,128] {
  ROOT %all = bf16[16,128]{1,0} all-gather(%own), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
}

%begin.2 (p: bf16[2,128]) -> bf16[16,128] {
  %all = bf16[16,128]{1,0} all-gather(%own), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %call = bf16[16,128] custom-call(%all), custom_call_target="AsyncCollectiveStart"
}

%body (p: s32[]) -> s32[] {
  %begun = bf16[16,128]{1,0} fusion(%x), kind=kCustom, calls=%begin.1
  %stepped = bf16[16,128]{1,0} fusion(%x), kind=kCustom, calls=%step.1
  %sum = f32[16]{0} all-reduce(%p), channel_id=9, replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (p: bf16[64,128]) -> bf16[8,128] {
  %loop = s32[] while(%t), condition=%condition, body=%body
  %begun = bf16[16,128]{1,0} fusion(%x), kind=kCustom, calls=%begin.2
  %sum = f32[16]{0} all-reduce(%p), channel_id=9, replica_groups=[1,8]<=[8], to_apply=%add
}
"""


def test_a_turn_outside_of_its_loop_counts_too() -> None:
    """XLA puts the first or the last turn of a loop outside of it. Its collectives have the channels of those in the loop."""
    hlo = Hlo(PEELED, make_mesh({"fsdp": 8}, jax.devices()))
    found = {(one.kind, one.count, one.bytes, one.asynchronous) for one in hlo.collectives()}
    assert found == {("all-gather", 7, 16 * 128 * 2, True), ("all-reduce", 7, 16 * 4, False)}


def test_costs_of_a_program_whose_true_counts_are_known() -> None:
    """A loop of products on this machine's compiler, then one pass over a large array."""

    def step(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0], y * 2 + 1

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((7, 256, 256), (32, 256), (1 << 20,))]
    text = jax.jit(step).lower(*shapes).compile().as_text()
    assert text is not None
    costs = Hlo(text, make_mesh({"data": 1}, jax.devices()[:1])).costs()
    assert sum(costs.flops.values()) == 7 * 2 * 32 * 256 * 256
    weights, rows, large = 7 * 256 * 256 * 4, 32 * 256 * 4, 2 * 4 * (1 << 20)
    least = weights + large + 7 * 2 * rows
    assert least <= sum(costs.traffic.values()) <= 1.5 * least
