"""Host snapshots of sharded arrays."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.snapshot import HostSnapshot
from xlatrain.xla.profiling import TraceWindow


def test_arrays_come_back_after_they_were_donated() -> None:
    mesh = make_mesh({"data": 2, "fsdp": 4})
    specs = (PartitionSpec("fsdp"), PartitionSpec(None, "fsdp"), PartitionSpec())
    host = [np.arange(32, dtype=np.float32).reshape(8, 4) * (i + 1) for i in range(3)]
    tree = {
        "a": [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(host, specs, strict=True)],
        "b": jax.numpy.int32(7),
    }
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    snapshot = HostSnapshot(tree)
    changed = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)(tree)
    assert float(changed["a"][0].sum()) == -32.0
    assert tree["a"][0].is_deleted()
    for _ in range(2):
        found = snapshot.restore()
        assert jax.tree.map(lambda x: x.sharding, found) == shardings
        assert all(np.array_equal(x, y) for x, y in zip(found["a"], host, strict=True))
        assert int(found["b"]) == 7


def test_wrong_trace_windows_are_named() -> None:
    with pytest.raises(ValueError, match="first_step=-1"):
        TraceWindow("", first_step=-1)
