"""Parameters that come into being on their shards: what of it needs no torch."""

from xlatrain.init.pretrained import PretrainedMismatchError, load_safetensors, open_safetensors
from xlatrain.init.safetensors import SafetensorsFile, StoredTensor

__all__ = [
    "PretrainedMismatchError",
    "SafetensorsFile",
    "StoredTensor",
    "load_safetensors",
    "open_safetensors",
]
