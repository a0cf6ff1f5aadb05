"""Arrays of a mesh on the host."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from torch_compat.utilities.host_arrays import _of_local_shards
from xlatrain.mesh.mesh import make_mesh


def test_a_whole_array_is_put_together_from_shards() -> None:
    host = np.arange(48.0, dtype=np.float32).reshape(8, 6)
    mesh = make_mesh({"data": 2, "fsdp": 4})
    for spec in (PartitionSpec("fsdp"), PartitionSpec("fsdp", "data"), PartitionSpec()):
        array = jax.device_put(host, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(_of_local_shards(array), host)
