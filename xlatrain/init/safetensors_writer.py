"""A safetensors file, written from arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32",
    "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write_safetensors(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Write arrays of any shape, by name, one after the other; the file appears when it is whole.

    Args:
        path: ends in ``.safetensors``, as readers expect.
        arrays: name → array that this process has whole.

    Raises:
        ValueError: a dtype that the format lacks, or an array that is split over processes; names it.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        if (code := _CODES.get(str(array.dtype))) is None:
            raise ValueError(f"{name!r} is {array.dtype}; a safetensors file has one of {', '.join(_CODES)}: convert it before")
        if not getattr(array, "is_fully_addressable", True) and not array.is_fully_replicated:
            raise ValueError(
                f"{name!r} lies on several processes; expected an array that this process has whole: save a checkpoint "
                "(trainer.save_checkpoint), and write the file from one process that restores it"
            )
        start, end = end, end + array.nbytes
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = Path(f"{os.fspath(path)}.part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(np.asarray(array)).tobytes())
    part.replace(path)
