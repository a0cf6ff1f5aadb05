"""The op ``xlatrain::experts`` on meshes: each token through its experts, as a loop over tokens has it; gradients too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlatrain.bridge.capture.activations import MESHES
from xlatrain.bridge.lower.lowerings import experts as lowering
from xlatrain.bridge.lower.registry import partitioned
from xlatrain.mesh import make_mesh
from xlatrain.mesh.sharding import PlannedSplit, ShardingRules
from xlatrain.preflight.hlo import Hlo

TOKENS, FEATURES, CHOSEN, EXPERTS, INNER = 64, 8, 2, 8, 6
Arrays = tuple[jax.Array, ...]


def arrays(routing: str, gated: bool, transposed: bool) -> Arrays:
    """x, index, weights, up, down."""
    random = np.random.default_rng(0)
    if routing == "even":
        index = np.stack([random.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)])
    else:  # all tokens go to the first two experts, which one device has
        index = np.broadcast_to(np.arange(CHOSEN), (TOKENS, CHOSEN)).copy()
    up = random.normal(size=(EXPERTS, INNER * (2 if gated else 1), FEATURES))
    down = random.normal(size=(EXPERTS, FEATURES, INNER))
    if transposed:
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    given = (random.normal(size=(TOKENS, FEATURES)), index, random.random((TOKENS, CHOSEN)), up, down)
    return tuple(jnp.asarray(one, jnp.int32 if one is index else jnp.float32) for one in given)


def reference(gated: bool, transposed: bool) -> Callable[..., jax.Array]:
    """Every token through every expert, those that it has not chosen weighing nothing."""

    def run(x: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array, index: jax.Array) -> jax.Array:
        up, down = (one if transposed else one.swapaxes(1, 2) for one in (up, down))
        inner = jnp.einsum("td,edi->eti", x, up)
        if gated:
            gate, value = jnp.split(inner, 2, axis=-1)
            inner = jax.nn.silu(gate) * value
        else:
            inner = jax.nn.silu(inner)
        every = jnp.einsum("eti,eid->etd", inner, down)
        share = jnp.sum(jax.nn.one_hot(index, EXPERTS) * weights[..., None], axis=1)
        return jnp.einsum("etd,te->td", every, share)

    return run


def on_mesh(axes: dict[str, int], gated: bool, transposed: bool) -> tuple[Any, Any, Mesh]:
    """The op and its gradients, compiled for a mesh on which tokens and experts are split; and the mesh."""
    mesh = make_mesh(axes)
    if mesh not in MESHES:
        MESHES.append(mesh)
    known = ("silu", gated, transposed, MESHES.index(mesh))
    tokens = NamedSharding(mesh, PartitionSpec(tuple(axis for axis in ("data", "fsdp", "expert") if axis in axes)))
    owned = NamedSharding(mesh, PartitionSpec("expert" if "expert" in axes else None))
    places = (tokens, tokens, tokens, owned, owned)

    def forward(*given: jax.Array) -> jax.Array:
        with partitioned(True, mesh):
            return lowering.experts(*given, *known)

    def backward(grad: jax.Array, *given: jax.Array) -> Arrays:
        with partitioned(True, mesh):
            return lowering.experts_backward(grad, *given, *known)

    # without compiler_options: the op alone
    return jax.jit(forward, in_shardings=places), jax.jit(backward, in_shardings=(tokens, *places)), mesh


@pytest.mark.parametrize(
    ("axes", "routing", "gated", "transposed"),
    [
        ({"data": 2, "expert": 4}, "even", True, False),
        ({"data": 2, "expert": 4}, "to one device", True, False),  # more than one round
        ({"fsdp": 2, "expert": 2, "tensor": 2}, "to one device", False, True),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, "even", True, False),
        ({"fsdp": 4, "expert": 2}, "even", True, True),
        ({"data": 2, "fsdp": 4}, "even", True, False),
        ({"expert": 2, "context": 2, "tensor": 2}, "even", True, True),
        ({"data": 8}, "even", True, False),
    ],
)
def test_experts_on_a_mesh(axes: dict[str, int], routing: str, gated: bool, transposed: bool) -> None:
    x, index, weights, up, down = given = arrays(routing, gated, transposed)
    forward, backward, _ = on_mesh(axes, gated, transposed)
    expected, pull = jax.vjp(lambda *args: reference(gated, transposed)(*args, index), x, weights, up, down)
    np.testing.assert_allclose(forward(*given), expected, rtol=2e-5, atol=2e-5)
    grad = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)
    for found, wanted in zip(backward(grad, *given), pull(grad), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("axes", [{"data": 2, "expert": 4}, {"data": 8}])
def test_tokens_are_not_gathered(axes: dict[str, int]) -> None:
    given = arrays("even", True, False)
    forward, backward, _ = on_mesh(axes, True, False)
    for program in (forward.lower(*given), backward.lower(given[0], *given)):
        text = program.compile().as_text()
        assert "all-gather" not in text
        assert ("all-to-all" in text) == ("expert" in axes)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "axes", [{"fsdp": 8}, {"fsdp": 4, "expert": 2}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "expert": 2, "tensor": 2}]
)
def test_gradients_are_summed_as_parameters_are_kept(axes: dict[str, int], transposed: bool) -> None:
    """Over ``fsdp`` by reduce-scatter, over ``data`` a device's part: no gradient of weights is summed whole."""
    inner, features = 64, 32
    shapes = [(EXPERTS, 2 * inner, features), (EXPERTS, features, inner)]
    shapes = [(count, last, first) for count, first, last in shapes] if transposed else shapes
    _, backward, mesh = on_mesh(axes, True, transposed)
    inners = (2, 1) if transposed else (1, 2)
    planned = {
        name: PlannedSplit(dim if "tensor" in axes else None, "", expert=0) for name, dim in zip("ud", inners, strict=True)
    }
    rules = ShardingRules(min_size=1, planned=planned)
    kept = tuple(NamedSharding(mesh, rules.spec(name, shape, mesh)) for name, shape in zip("ud", shapes, strict=True))
    tokens = NamedSharding(mesh, PartitionSpec(tuple(axis for axis in ("data", "fsdp", "expert") if axis in axes)))
    program = jax.jit(lambda *given: backward(*given)[2:], in_shardings=(*[tokens] * 4, *kept), out_shardings=kept)
    given = [(TOKENS, features), (TOKENS, features), (TOKENS, CHOSEN), (TOKENS, CHOSEN), *shapes]
    dtypes = [jnp.int32 if at == 2 else jnp.float32 for at in range(len(given))]
    text = program.lower(*map(jax.ShapeDtypeStruct, given, dtypes)).compile().as_text()
    sent: Counter[str] = Counter()
    for one in Hlo(text, mesh).collectives():
        if "tensor" not in one.axes and one.bytes > 8:  # not the sums of tokens' gradients, nor the number of rounds
            sent[one.kind] += one.bytes * one.count
    whole = 4 * sum(map(math.prod, shapes)) // (axes.get("expert", 1) * axes.get("tensor", 1))
    assert sent["reduce-scatter"] == whole, sent
    assert sent["all-reduce"] == (whole // axes["fsdp"] if "data" in axes else 0), sent
