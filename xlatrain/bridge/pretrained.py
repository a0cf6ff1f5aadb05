"""Pretrained weights for a torch module: read when, and where, they are needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import torch

from xlatrain.bridge.converted_names import convert_names
from xlatrain.bridge.tensors.dtypes import torch_dtype
from xlatrain.bridge.tensors.host import from_numpy
from xlatrain.bridge.tensors.lazy import lazy_tensor
from xlatrain.init.joined import Readable
from xlatrain.init.pretrained import NameMapping, check_match, open_safetensors, place_stored


@dataclass(frozen=True)
class StoredSource:
    """Reads a lazy tensor's values from a safetensors file: all of them, or each shard."""

    stored: Readable

    def __call__(self) -> torch.Tensor:
        return from_numpy(self.stored.read())

    def place(self, template: jax.ShapeDtypeStruct) -> jax.Array:
        """The values on the shards of ``template``, in its dtype."""
        return place_stored(self.stored, template)


def load_pretrained(
    module: torch.nn.Module, path: str | os.PathLike[str], *, names: NameMapping = None, strict: bool = True
) -> None:
    """Give the parameters and persistent buffers of ``module`` the values of a safetensors checkpoint.

    What was made in :func:`~xlatrain.bridge.lazy_init.deferred_init` is read later, each process the bytes of its own shards,
    when the module is placed; other tensors take the values now. Values are converted to the dtype that the module has. Of tied
    weights one stored name is enough. Of ``transformers`` models the names, and experts' tensors, that checkpoints have instead
    of the module's are known (:func:`~xlatrain.bridge.converted_names.convert_names`).

    Args:
        module: what to load.
        path: a ``.safetensors`` file, an index, or a directory in Hugging Face's layout.
        names: how stored names become those of the module: a function (None leaves a tensor out), or a dict of prefixes to
            replace, e.g. ``{"": "model."}``.
        strict: refuse names that are stored or in the module only. A wrong shape is always refused.

    Raises:
        PretrainedMismatchError: lists every missing, unexpected and mis-shaped name; nothing was loaded.
        FileNotFoundError, SafetensorsError, ValueError: see :func:`xlatrain.init.open_safetensors`.
    """
    targets: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    opened = convert_names(module, open_safetensors(path, names), targets)
    check_match(path, opened, _wanted(targets, opened), strict=strict)
    loaded: set[int] = set()
    with torch.no_grad():
        for name, tensor in targets.items():
            if name in opened and id(tensor) not in loaded:
                loaded.add(id(tensor))
                tensor.copy_(_lazily(opened[name]))


def _lazily(stored: Readable) -> torch.Tensor:
    return lazy_tensor(stored.shape, torch_dtype(stored.dtype), StoredSource(stored))


def _wanted(targets: Mapping[str, torch.Tensor], opened: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the names that should be stored: all names of the module; of tied names only those that are stored."""
    found = {id(tensor) for name, tensor in targets.items() if name in opened}
    return {name: tuple(tensor.shape) for name, tensor in targets.items() if name in opened or id(tensor) not in found}
