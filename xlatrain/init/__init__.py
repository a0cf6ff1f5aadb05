"""Initial and stored values of parameters, directly on their shards, without torch."""

from xlatrain.init.pretrained import PretrainedMismatchError, load_safetensors, open_safetensors
from xlatrain.init.safetensors import SafetensorsFile, StoredTensor

__all__ = [
    "PretrainedMismatchError",
    "SafetensorsFile",
    "StoredTensor",
    "load_safetensors",
    "open_safetensors",
]
