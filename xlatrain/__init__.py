"""xlatrain: meshes, sharding, compiled steps and sharded checkpoints for JAX and, through a bridge, PyTorch.

Importing this package starts no JAX backend and does not import torch.
"""

from xlatrain import moved
from xlatrain.supported import JAX

__version__ = "0.1.0"

JAX.check()
moved.register(moved.MODULES, moved.NAMES)
