"""A checkpoint dict in one file, as stock's: what ``torch.save`` writes of it, with a commit record at its end."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import IO, Any

import jax
import torch

from torch_compat.checkpoint import host_state
from torch_compat.checkpoint.markers import StoredArray, with_arrays
from torch_compat.utilities.host_arrays import to_torch
from xlatrain.checkpoint import BodyWriter, check_body


def is_whole(array: Any) -> bool:
    """Whether every device has all of the array."""
    return not isinstance(array, jax.Array) or array.is_fully_replicated


def file_writer(host: Any, arrays: Mapping[str, Any]) -> Callable[[BodyWriter], None]:
    """The function that writes the file, of a dict with markers and its arrays as they are now; all may change afterwards.

    Raises:
        TypeError: a value cannot be pickled at all; names its key.
    """
    data, safe = host_state.pickled(host)
    tensors: dict[StoredArray, torch.Tensor] = {}

    def read(stored: StoredArray) -> torch.Tensor:
        if stored not in tensors:
            tensors[stored] = to_torch(arrays[stored.name], stored.dtype)
        return tensors[stored]

    state = with_arrays(host, read)  # brings the arrays to the host
    if safe:
        # Of `host` the bytes are kept, since a callback's dicts change; reading them back runs nobody's code.
        return lambda file: torch.save(with_arrays(host_state.unpickled(data), tensors.__getitem__), file)  # pyright: ignore[reportArgumentType]
    whole = io.BytesIO()
    torch.save(state, whole)

    def write(file: BodyWriter) -> None:
        file.write(whole.getbuffer())

    return write


def read_file(file: IO[bytes], name: str, weights_only: bool | None) -> Any:
    """The dict in an open file of ours, which is compared with its record, or of stock's; tensors on the CPU.

    Raises:
        CorruptCheckpointError: the file is ours, and not what was committed.
        UnreadableCheckpointError, pickle.UnpicklingError: see :func:`~torch_compat.checkpoint.host_state.load_file`.
    """
    start = file.tell()
    ours = start == 0 and check_body(name, file) is not None  # pyright: ignore[reportArgumentType]
    file.seek(start)
    return host_state.load_file(file, name, weights_only=weights_only, stand_ins=ours)
