"""Lookups in a table whose features ``fsdp`` splits: rows are exchanged for features and back, and no batch is gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.bridge.capture.activations import MESHES
from xlatrain.bridge.lower.lowerings import own_ops
from xlatrain.mesh import make_mesh
from xlatrain.preflight.hlo import Hlo

WORDS, FEATURES, LENGTH = 32, 8, 6


@pytest.mark.parametrize(
    "axes", [{"data": 2, "fsdp": 2, "expert": 2}, {"stage": 2, "data": 2, "fsdp": 2}, {"fsdp": 2, "context": 2}]
)
@pytest.mark.parametrize("rows", [16, 3])
def test_a_lookup_exchanges_rows_for_features(axes: dict[str, int], rows: int) -> None:
    """Rows that do not divide are looked up all the same. Beside ``expert`` the whole batch's features were gathered."""
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    mesh = make_mesh(axes, devices)
    if mesh not in MESHES:
        MESHES.append(mesh)
    known, split = MESHES.index(mesh), rows % 8 == 0
    random = np.random.default_rng(0)
    ids, table = random.integers(0, WORDS, (rows, LENGTH)), random.normal(size=(WORDS, FEATURES)).astype(np.float32)
    given = random.normal(size=(rows, LENGTH, FEATURES)).astype(np.float32)
    sequence = "context" if "context" in axes else None
    batch = NamedSharding(mesh, PartitionSpec(tuple(axis for axis in axes if axis != sequence) if split else None, sequence))

    def both(table: jax.Array, ids: jax.Array, given: jax.Array) -> tuple[jax.Array, jax.Array]:
        places = own_ops.whole_over_fsdp(ids, known)
        found = own_ops.rows_of_features(own_ops.split_features(table, known)[places], known)
        grad = own_ops.features_of_rows(given, known)
        return found, jnp.zeros_like(table).at[places].add(grad)

    places = (NamedSharding(mesh, PartitionSpec("fsdp")), batch, batch)
    compiled = jax.jit(both, in_shardings=places, out_shardings=(batch, places[0])).lower(table, ids, given).compile()
    found, grad = compiled(*jax.device_put((table, ids, given), places))
    np.testing.assert_array_equal(found, table[ids])
    expected = np.zeros_like(table)
    np.add.at(expected, ids, given)
    np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-5)
    gathered = [one.bytes for one in Hlo(compiled.as_text(), mesh).collectives() if one.kind in ("all-gather", "all-reduce")]
    if split:
        assert max(gathered) <= max(WORDS * FEATURES * 4, rows * LENGTH * 8)  # ids and the table's gradient, no features of rows
