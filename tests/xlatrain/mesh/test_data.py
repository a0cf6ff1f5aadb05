"""Placing host batches on a mesh of 8 CPU devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from xlatrain.mesh import placement
from xlatrain.mesh.data import BatchPlacer, prefetch
from xlatrain.mesh.mesh import make_mesh

AXES = [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}]


@pytest.fixture(params=AXES, ids=str)
def placer(request: pytest.FixtureRequest) -> BatchPlacer:
    return BatchPlacer(make_mesh(request.param))


def test_rows_lie_in_mesh_order(placer: BatchPlacer) -> None:
    x = np.arange(48.0, dtype=np.float32).reshape(16, 3)
    batch, rows, _ = placer({"x": x})
    assert not rows.is_padded
    np.testing.assert_array_equal(batch["x"], x)
    starts = [shard.index[0].start or 0 for shard in batch["x"].addressable_shards]
    assert starts == sorted(starts)
    assert len(set(starts)) == placer.layout.count


@pytest.mark.parametrize("size", [1, 3, 9, 15])
def test_uneven_batches_come_back_exactly(placer: BatchPlacer, size: int) -> None:
    x = np.random.default_rng(0).normal(size=(size, 2)).astype(np.float32)
    (placed,), rows, _ = placer((x,))
    assert placed.shape[0] == rows.padded
    assert rows.padded % placer.layout.count == 0
    np.testing.assert_array_equal(jax.jit(rows.cut)(placed), x)
    np.testing.assert_array_equal(np.asarray(placed)[size:], np.repeat(x[-1:], rows.padded - size, 0))


def test_leaves_of_another_length_are_replicated(placer: BatchPlacer) -> None:
    batch, rows, split = placer(
        {"x": np.zeros((16, 2), np.float32), "weights": np.arange(5.0, dtype=np.float32), "lr": np.float32(3)}
    )
    assert rows.size == 16
    assert split == (False, False, True)  # lr, weights, x: as JAX flattens
    assert batch["weights"].sharding.is_fully_replicated
    assert batch["weights"].tolist() == [0, 1, 2, 3, 4]
    assert float(batch["lr"]) == 3


def test_cut_leaves_replicated_leaves_alone() -> None:
    batch = BatchPlacer(make_mesh({"data": 8}))({"x": np.arange(3), "weights": np.arange(8), "more": np.arange(5)})
    real = jax.jit(lambda tree, cut: cut(tree), static_argnames="cut")(batch.tree, cut=batch.cut)
    assert {name: leaf.tolist() for name, leaf in real.items()} == {
        "x": [0, 1, 2],
        "weights": list(range(8)),  # as many as there are padded rows
        "more": list(range(5)),
    }


def test_batch_size_is_that_of_the_first_leaf_as_written() -> None:
    placer = BatchPlacer(make_mesh({"data": 8}))
    batch, rows, _ = placer({"x": np.zeros((16, 2), np.float32), "a": np.zeros(3, np.float32)})  # JAX would take "a" first
    assert rows.size == 16
    assert placer({"a": np.zeros(3), "x": np.zeros((16, 2))}, batch_size=16).rows.size == 16
    assert not batch["x"].sharding.is_fully_replicated


def test_without_an_array_leaf_there_is_one_row() -> None:
    (placed,), rows, _ = BatchPlacer(make_mesh({"data": 8}))((np.float32(2),))
    assert rows.size == 1
    assert float(placed) == 2


def test_batch_spec_overrides_the_rule() -> None:
    placer = BatchPlacer(make_mesh({"data": 2, "tensor": 4}), {"x": P("data", "tensor"), "table": P(), "y": None})
    x = np.arange(40.0, dtype=np.float32).reshape(5, 8)
    batch, rows, _ = placer({"x": x, "table": np.arange(5), "y": np.arange(5)})
    assert batch["x"].sharding.spec == P("data", "tensor")
    np.testing.assert_array_equal(rows.cut(batch["x"]), x)
    assert batch["table"].sharding.is_fully_replicated
    assert batch["table"].shape == (5,)
    assert batch["y"].shape == (6,)


@pytest.mark.parametrize(
    ("spec", "leaf", "message"),
    [
        ({"x": P("tensor")}, np.zeros((4, 4)), r"batch\['x'\]: dim 0 is 'tensor', but it must be split over all batch axes"),
        ({"x": P(("data",), "tensor")}, np.zeros((4, 3)), r"batch\['x'\] of shape \(4, 3\) cannot be placed"),
        ({"y": P()}, np.zeros((4, 4)), "batch_spec is not a prefix of the batch's structure"),
    ],
)
def test_wrong_batch_specs_are_named(spec: Any, leaf: np.ndarray, message: str) -> None:
    placer = BatchPlacer(make_mesh({"data": 2, "tensor": 4}), spec)
    with pytest.raises(ValueError, match=message):
        placer({"x": leaf})


def test_one_device_passes_numpy_straight() -> None:
    placer = BatchPlacer(make_mesh({"data": 1}, jax.devices()[:1]))
    x = np.zeros((3, 2), np.float32)
    (placed,), rows, _ = placer((x,))
    assert placed is x
    assert rows.size == rows.padded == 3
    (copied,), _, _ = BatchPlacer(placer.mesh, copy=True)((x,))
    assert copied is not x


def aligned(n: int) -> np.ndarray:
    """float32 zeros that JAX on CPU uses without a copy: aligned to 64 bytes."""
    memory = np.zeros(4 * n + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * n].view(np.float32)


@pytest.mark.parametrize("devices", [1, 8])
def test_copies_are_not_changed_with_the_original(devices: int) -> None:
    x = aligned(8 * 1024)
    (placed,), _, _ = BatchPlacer(make_mesh({"data": devices}, jax.devices()[:devices]), copy=True)((x,))
    x += 1
    assert not np.asarray(placed).any()


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.float64, np.float32),
        (np.complex128, np.complex64),
        (np.float16, np.float16),
        (jnp.bfloat16, jnp.bfloat16),
        (np.bool_, np.bool_),
        (np.int8, np.int8),
    ],
)
def test_64_bit_types_narrow(given: Any, held: Any) -> None:
    x = np.ones(8, given)
    (placed,), _, _ = BatchPlacer(make_mesh({"data": 8}))((x,))
    assert placed.dtype == held
    np.testing.assert_array_equal(np.asarray(placed), x.astype(held))


def test_64_bit_types_stay_with_x64() -> None:
    with jax.enable_x64(True):
        (placed, wide), _, _ = BatchPlacer(make_mesh({"data": 8}))((np.full(8, 2**40), np.full(8, 1 / 3)))
        assert placed.dtype == np.int64
        assert placed.tolist() == [2**40] * 8
        assert wide.tolist() == [1 / 3] * 8


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**62])
@pytest.mark.parametrize("devices", [1, 8])
def test_integers_that_do_not_fit_are_named(value: int, devices: int) -> None:
    placer = BatchPlacer(make_mesh({"data": devices}, jax.devices()[:devices]))
    with pytest.raises(OverflowError, match=rf"batch\['ids'\] is int64 with values from .*{value}.* do not fit int32"):
        placer({"x": np.zeros(8), "ids": np.array([0] * 7 + [value])})
    assert placer({"ids": np.array([2**31 - 1, -(2**31)])}).rows.size == 2


def test_what_is_no_number_is_named() -> None:
    with pytest.raises(TypeError, match=r"batch\['name'\]\[1\] is <U1, .*take it out of the batch"):
        BatchPlacer(make_mesh({"data": 8}))({"x": np.zeros(8), "name": [np.zeros(8), "b"]})


def test_public_fallback_places_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(20.0, dtype=np.float32)
    fast = BatchPlacer(make_mesh({"data": 2, "fsdp": 4}))((x, np.float32(1)))
    monkeypatch.setattr(placement, "_internal", None)
    slow = BatchPlacer(make_mesh({"data": 2, "fsdp": 4}))((x, np.float32(1)))
    assert slow.rows == fast.rows
    for a, b in zip(slow.tree, fast.tree, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding == b.sharding


def test_jax_arrays_are_placed_too() -> None:
    (placed,), _, _ = BatchPlacer(make_mesh({"data": 8}))((jnp.arange(16),))
    assert len(placed.addressable_shards) == 8
    assert placed.tolist() == list(range(16))


@pytest.mark.parametrize("depth", [0, 1, 3, 10])
def test_prefetch_keeps_the_order_and_draws_no_further_than_asked(depth: int) -> None:
    drawn = []

    def batches() -> Any:
        for i in range(6):
            drawn.append(i)
            yield i

    placed = prefetch(batches(), lambda i: 10 * i, depth)
    assert next(placed) == 0
    assert len(drawn) == min(depth + 1, 6)
    assert list(placed) == [10, 20, 30, 40, 50]


def test_prefetch_depth_is_checked() -> None:
    with pytest.raises(ValueError, match="depth must be at least 0, not -1"):
        next(prefetch([], lambda x: x, -1))
