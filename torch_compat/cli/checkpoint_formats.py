"""Checkpoints in other formats: safetensors in Hugging Face's layout, torch state dicts, stock Lightning files, and back.

Each function is an entry point of ``xlatrain.formats`` (``xlatrain ckpt convert --to NAME``); it gives what it wrote.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_compat.checkpoint import host_state
from torch_compat.checkpoint.checkpoint_dict import export_checkpoint_file, load_checkpoint_dict, save_checkpoint_dict
from torch_compat.plugins.io.mesh_io import facts_of
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.checkpoint import ForeignPathError

_SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
PathArgument = str | os.PathLike[str]


def to_safetensors(
    source: PathArgument,
    target: PathArgument,
    *,
    prefix: str = "",
    max_file_size: int = 5_000_000_000,
    weights_only: bool | None = True,
) -> list[Path]:
    """Write the module's weights into a directory in the layout that ``from_pretrained`` of Hugging Face reads.

    One file ``model.safetensors``, or several with ``model.safetensors.index.json``. Read from a checkpoint directory tensor by
    tensor: this needs the memory of the largest tensor. Tied weights are written under each of their names.

    Args:
        source: a checkpoint directory, or a stock ``.ckpt`` file (which is read whole).
        target: the directory; made if it is not there.
        prefix: only the weights whose names begin with it, without it: ``"model."`` for ``self.model = AutoModel…``.
        max_file_size: bytes of a file; a larger tensor gets one of its own.
        weights_only: False unpickles, see :func:`torch_compat.checkpoint.checkpoint_dict.load_checkpoint_dict`.

    Raises:
        ForeignPathError: the target holds safetensors files already.
        ValueError: no weight begins with ``prefix``; a dtype that safetensors lacks; names the weight.
    """
    state = _weights(source, prefix, weights_only)
    directory = Path(target)
    if present := sorted(path.name for path in directory.glob("*.safetensors*")):
        raise ForeignPathError(f"{directory} holds {', '.join(present[:3])} already; give an empty directory, or remove them")
    directory.mkdir(parents=True, exist_ok=True)
    files = _in_files({name: _size(name, tensor) for name, tensor in state.items()}, max_file_size)
    total = sum(_size(name, tensor) for name, tensor in state.items())
    weight_map, written = {}, []
    for number, names in enumerate(files, start=1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(directory / name, names, state)
        weight_map |= dict.fromkeys(names, name)
        written.append(directory / name)
    if len(files) > 1:
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
        written.append(index)
    return written


def to_torch(source: PathArgument, target: PathArgument, *, weights_only: bool | None = True) -> list[Path]:
    """Write the module's ``state_dict`` as one file for ``torch.load``. The weights must fit in host memory."""
    _refuse_existing(target)
    state = _weights(source, "", weights_only)
    # Tensor by tensor: values that were read are freed when they are copied.
    torch.save({name: state.pop(name).detach().clone() for name in list(state)}, os.fspath(target))
    return [Path(target)]


def to_lightning(source: PathArgument, target: PathArgument, *, weights_only: bool | None = True) -> list[Path]:
    """Write a ``.ckpt`` file that stock Lightning continues from. The checkpoint must fit in host memory."""
    _refuse_existing(target)
    export_checkpoint_file(source, target, weights_only)
    return [Path(target)]


def to_directory(source: PathArgument, target: PathArgument, *, weights_only: bool | None = True) -> list[Path]:
    """Write a stock Lightning ``.ckpt`` file as a checkpoint directory: tensors of weights and optimizers become stored arrays.

    Raises:
        pickle.UnpicklingError: the file holds what the safe loader does not read, and ``weights_only`` is not False.
    """
    _refuse_existing(target)
    checkpoint = load_checkpoint_dict(source, weights_only)
    arrays: dict[tuple[Any, ...], Any] = {}  # tied weights stay one array

    def array(tensor: torch.Tensor) -> Any:
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) if tensor.numel() else (id(tensor), None)
        return arrays.setdefault(key, as_numpy(tensor.detach()))

    stored = {id(tensor) for key in ("state_dict", "optimizer_states") for tensor in _tensors(checkpoint.get(key))}
    save_checkpoint_dict(
        target,
        checkpoint,
        on_mesh=lambda tensor: array(tensor) if id(tensor) in stored else None,
        facts=facts_of(checkpoint),
        directory=True,
    )
    return [Path(target)]


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def match(node: Any) -> torch.Tensor | None:
        if isinstance(node, torch.Tensor):
            found.append(node)
        return None

    host_state.replace_leaves(tree, match, lambda *_: None)
    return found


def _refuse_existing(target: PathArgument) -> None:
    if os.path.lexists(target):
        raise ForeignPathError(f"{os.fspath(target)} exists; give another path, or remove it first")


def _weights(source: PathArgument, prefix: str, weights_only: bool | None) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint_dict(source, weights_only, lazy=True)
    if not isinstance(checkpoint.get("state_dict"), Mapping):
        raise ValueError(f"{os.fspath(source)} holds no state_dict: keys are {', '.join(map(str, checkpoint))}")
    state = checkpoint["state_dict"]
    chosen = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    chosen = {name: value for name, value in chosen.items() if isinstance(value, torch.Tensor)}
    if not chosen:
        raise ValueError(f"no weight begins with {prefix!r}; names are {', '.join(list(state)[:5])}, …")
    return chosen


def _size(name: str, tensor: torch.Tensor) -> int:
    if tensor.dtype not in _SAFETENSORS:
        raise ValueError(f"{name} is {tensor.dtype}, which safetensors does not have")
    return tensor.numel() * tensor.dtype.itemsize


def _in_files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def _write_file(path: Path, names: list[str], state: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file. Each tensor is dropped when it is written: a lazy one keeps what it has read.

    Format: https://huggingface.co/docs/safetensors/index#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        size = _size(name, state[name])
        header[name] = {
            "dtype": _SAFETENSORS[state[name].dtype],
            "shape": list(state[name].shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in names:
            values = np.ascontiguousarray(as_numpy(state.pop(name).detach()))
            file.write(values.reshape(-1).view(np.uint8).data)
