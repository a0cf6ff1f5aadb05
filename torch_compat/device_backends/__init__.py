"""Backends that run torch itself, op by op, on accelerators: torch-xla, and its successor torch_tpu.

JAX drives nothing then. It keeps a mesh of as many *host* devices, of the same shape: what decides where rows and shards are,
what makes parameters and what reads and writes checkpoints works on that mesh, and a backend moves shards between the two.
"""

from torch_compat.device_backends.backend import DeviceBackend
from torch_compat.device_backends.placed_module import PlacedModule

__all__ = ["DeviceBackend", "PlacedModule"]
