"""Parameters that come into being on their shards: what of it needs no torch."""

from xlatrain.init.host_memory import available_host_memory
from xlatrain.init.pretrained import PretrainedMismatchError, load_safetensors, open_safetensors
from xlatrain.init.safetensors import SafetensorsFile, StoredTensor

__all__ = [
    "PretrainedMismatchError",
    "SafetensorsFile",
    "StoredTensor",
    "available_host_memory",
    "load_safetensors",
    "open_safetensors",
]
