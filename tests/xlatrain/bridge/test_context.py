"""Attention whose sequences a mesh splits: each device computes its own queries, with the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.xlatrain.bridge._compare import as_host, with_gradients
from tests.xlatrain.bridge.test_splash import assert_near, causal, on_mesh, operands, packed, padded, request, whole, window
from xlatrain.bridge.capture.masks.band import CAUSAL, Band
from xlatrain.bridge.lower.kernels.choice import SWITCH, Gathered, Splash, Xla, choose
from xlatrain.bridge.lower.kernels.sequence import balanced_places, from_balanced, to_balanced
from xlatrain.bridge.lower.kernels.splash import Blocks, Shards
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.placement import batch_spec, sequence_length

AXES: list[dict[str, int]] = [{"fsdp": 2, "context": 4}, {"context": 2, "tensor": 4}, {"data": 2, "context": 2, "tensor": 2}]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Pallas sets as it is first used is taken back."""
    monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", "/usr/local/cuda")


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("fn", [causal, window, packed, padded, whole])
def test_queries_of_a_device_see_gathered_keys(fn: Callable[..., Any], axes: dict[str, int]) -> None:
    args = operands(64, 64, rows=2)
    text, found = on_mesh(make_mesh(axes), fn, args)
    assert "shard_map" in text and "pallas_call" not in text
    assert_near(found, as_host(with_gradients(fn)(*args)), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "length", "axes"),
    [
        (causal, 1024, {"fsdp": 2, "context": 4}),
        (causal, 512, {"context": 2, "tensor": 4}),
        (packed, 512, {"data": 2, "context": 2, "tensor": 2}),
        (window, 512, {"fsdp": 2, "context": 4}),
        (whole, 256, {"fsdp": 4, "context": 2}),
        (causal, 384, {"context": 3}),  # not in balanced order
    ],
)
def test_kernels_of_a_part_of_the_queries(
    fn: Callable[..., Any], length: int, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "interpret")
    args = operands(length, length, rows=4)
    mesh = make_mesh(axes, jax.devices()[: int(np.prod(list(axes.values())))])
    text, found = on_mesh(mesh, fn, args)
    assert "pallas_call" in text and ("ppermute" in text) == (fn in (causal, packed) and length != 384)
    assert_near(found, as_host(with_gradients(fn)(*args)), 2e-6)


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh({"fsdp": 2, "context": 4})
    assert str(choose(request(), mesh)) == "XLA: no TPU; rows over fsdp, queries over context"
    assert isinstance(choose(request(), mesh), Gathered)
    assert isinstance(choose(request(mask=True), mesh), Xla)
    assert "258 keys do not divide over the context axis of 4" in str(choose(request(keys=(8, 4, 258, 64)), mesh))
    monkeypatch.setenv(SWITCH, "interpret")
    long = dict.fromkeys(("queries", "keys", "values"), (8, 4, 4096, 64))
    balanced = choose(request(**long, band=CAUSAL), mesh)
    assert isinstance(balanced, Splash) and balanced.balanced
    windowed = choose(request(**long, band=Band(100, 0)), mesh)
    assert isinstance(windowed, Splash) and not windowed.balanced
    short = choose(request(), mesh)
    assert str(short).startswith("XLA: 256 queries and 256 keys over context: the kernel takes multiples of 128 on each device")


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_balanced_order(parts: int) -> None:
    places = balanced_places(16 * parts, parts).reshape(parts, -1)
    assert sorted(places.flatten()) == list(range(16 * parts))
    assert len(set(places.sum(axis=1))) == 1  # all parts see as many keys
    mesh = make_mesh({"context": parts}, jax.devices()[:parts])
    split = PartitionSpec(None, "context")

    def there(x: jax.Array) -> jax.Array:
        return to_balanced(x, parts, 1)

    def and_back(x: jax.Array) -> jax.Array:
        return from_balanced(to_balanced(x, parts, 1), parts, 1)

    x = np.arange(16 * parts)[None]
    for function, expected in ((there, places.reshape(1, -1)), (and_back, x)):
        run = jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        np.testing.assert_array_equal(jax.jit(run)(x), expected)  # without compiler_options: data moves only


def test_balanced_blocks_are_an_even_part_of_the_work() -> None:
    shards = Shards(4, balanced=True)
    own = Blocks.of(32768 // 4, 32768, 128, 2, shards)
    assert (own.query, own.key, own.queries, own.keys) == (1024, 1024, 8192, 32768)
    assert Blocks.of(384, 1536, 128, 2, Shards(4)).query == 128


def test_the_sequence_of_a_batch() -> None:
    mesh = make_mesh({"fsdp": 2, "context": 4})
    assert sequence_length([(8,), (8, 64), (8, 64, 3), (8, 3)], mesh) == 64
    assert batch_spec((8, 64, 3), mesh, 64) == PartitionSpec(("fsdp",), "context")
    assert batch_spec((8, 3), mesh, 64) == batch_spec((8,), mesh, 64) == PartitionSpec(("fsdp",))
    assert sequence_length([(8, 65)], make_mesh({"fsdp": 8})) is None
    with pytest.raises(ValueError, match="a sequence of 66 does not divide by mesh axis 'context' of size 4"):
        sequence_length([(8, 66)], mesh)
    with pytest.raises(ValueError, match=r"no array of this batch has one: their shapes are \[\(8,\)\]"):
        sequence_length([(8,)], mesh)
