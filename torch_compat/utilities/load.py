"""Reading ``torch.save`` files tensor by tensor. API: ``lightning.fabric.utilities.load``.

Stock's ``_lazy_load`` gives objects that read a tensor when it is used. PyTorch does the same by mapping the file: what is not
used is never read, and nothing needs to be materialized.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_compat.utilities.device_transfer import apply_to_collection
from torch_compat.utilities.types import _PATH, _Stateful

_METADATA_FILENAME = "meta.pt"


def _lazy_load(filename: _PATH) -> Any:
    """Load a file that ``torch.save`` wrote, with tensors that are read from it when they are used.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not os.path.isfile(filename):
        raise FileNotFoundError(f"Path {str(filename)!r} does not exist or is not a file.")
    return torch.load(filename, map_location="cpu", mmap=True, weights_only=True)


def _materialize_tensors(collection: Any) -> Any:
    """``collection`` with tensors of its own in place of those mapped from a file."""
    return apply_to_collection(collection, Tensor, torch.clone)


def _move_state_into(source: dict[str, Any], destination: dict[str, Any | _Stateful], keys: set[str] | None = None) -> None:
    """Move entries of ``source`` (those in ``keys``, or all) into ``destination``, through its ``load_state_dict``."""
    for key in set(source) if keys is None else keys & set(source):
        state = source.pop(key)
        target = destination.get(key)
        if isinstance(target, _Stateful):
            target.load_state_dict(state)
        else:
            destination[key] = state


def _load_distributed_checkpoint(checkpoint_folder: Path) -> dict[str, Any]:
    """A folder that ``torch.distributed.checkpoint`` wrote, and what lies beside it in ``meta.pt``, as one dict on the CPU.

    Raises:
        FileNotFoundError: the folder holds no such checkpoint.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    if not (checkpoint_folder / ".metadata").is_file():
        raise FileNotFoundError(f"{checkpoint_folder} holds no checkpoint of torch.distributed.checkpoint: it has no .metadata")
    checkpoint: dict[str, Any] = {}
    _load_state_dict(
        checkpoint, storage_reader=FileSystemReader(checkpoint_folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    beside = checkpoint_folder / _METADATA_FILENAME
    if beside.is_file():
        found: MutableMapping[str, Any] = torch.load(beside, map_location="cpu", weights_only=True)
        checkpoint.update(found)
    return checkpoint
