"""safetensors files, read by byte ranges: only the rows that are asked for, into memory of their own.

Format: https://huggingface.co/docs/safetensors/index#format. The library's own reader maps the file into memory; the mapped pages
count as the process's memory, so that reading a shard of every tensor would take the whole file's size.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32, "I32": np.int32,
        "U64": np.uint64, "I64": np.int64, "F16": np.float16, "BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64,
        "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2, "C64": np.complex64,
    }.items()
}  # fmt: skip
_HEADER_LIMIT = 100 << 20


class SafetensorsError(ValueError):
    """A file that is not a safetensors file, or is damaged."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file.

    Attributes:
        file: where it is.
        name: in the file.
        shape: of the whole tensor.
        dtype: as stored.
        offset: of its first byte in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    @property
    def size_bytes(self) -> int:
        """Size of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The elements of ``index`` (a slice with step 1 for each leading dim), in memory of their own.

        Only the bytes from the first to the last row of the slice along dim 0 are read.

        Raises:
            SafetensorsError: the file ends too early.
        """
        bounds = [part.indices(length)[:2] for part, length in zip(index, self.shape, strict=False)]
        if 0 in self.shape:
            sizes = (stop - start for start, stop in bounds)
            return np.zeros((*sizes, *self.shape[len(bounds) :]), self.dtype)
        start, stop = bounds[0] if bounds else (0, self.shape[0] if self.shape else 1)
        rest = tuple(slice(*bound) for bound in bounds[1:])
        if all((part.start, part.stop) == (0, length) for part, length in zip(rest, self.shape[1:], strict=False)):
            return self._rows(start, stop)
        return self._columns(start, stop, rest)

    def _columns(self, start: int, stop: int, rest: tuple[slice, ...]) -> np.ndarray:
        """Some columns of some rows: a few rows at a time, so that no more than the result stays in memory."""
        shape = (stop - start, *(part.stop - part.start for part in rest), *self.shape[1 + len(rest) :])
        result = np.empty(shape, self.dtype)
        step = max(1, (16 << 20) // (math.prod(self.shape[1:]) * self.dtype.itemsize))
        for first in range(start, stop, step):
            last = min(first + step, stop)
            result[first - start : last - start] = self._rows(first, last)[(slice(None), *rest)]
        return result

    def _rows(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop - 1`` along dim 0, [stop - start, …], in memory of their own; of a scalar the scalar.

        Raises:
            SafetensorsError: the file is too short.
        """
        row = math.prod(self.shape[1:])
        count = (stop - start) * row if self.shape else 1
        buffer = np.empty(count, self.dtype)
        view = buffer.view(np.uint8).data if count else memoryview(b"")
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            position, done = self.offset + start * row * self.dtype.itemsize, 0
            while done < len(view):
                got = os.preadv(descriptor, [view[done : done + (1 << 30)]], position + done)
                if got == 0:
                    raise SafetensorsError(f"{self.file} ends inside of tensor {self.name!r}; download it again")
                done += got
        finally:
            os.close(descriptor)
        return buffer.reshape(stop - start, *self.shape[1:]) if self.shape else buffer.reshape(())


class SafetensorsFile(Mapping[str, StoredTensor]):
    """The tensors of one file, by name; only the header is read.

    Raises:
        SafetensorsError: not a safetensors file, or one whose header is wrong; names the file and what was found.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        facts = self.path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise SafetensorsError(f"{self.path} is not an ordinary file")
        size = facts.st_size
        with self.path.open("rb") as file:
            length_bytes = file.read(8)
            if length_bytes[:2] == b"PK":
                raise SafetensorsError(
                    f"{self.path} is not a safetensors file but one of torch.save, which is not read by shards: "
                    "convert it once with safetensors.torch.save_file(torch.load(path, mmap=True), …)"
                )
            length = struct.unpack("<Q", length_bytes)[0] if len(length_bytes) == 8 else -1
            if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
                raise SafetensorsError(
                    f"{self.path} is not a safetensors file: its first 8 bytes give a header of {length} bytes"
                )
            header = file.read(length)
        try:
            described: dict[str, Any] = dict(json.loads(header))
        except (ValueError, TypeError, RecursionError) as error:
            raise SafetensorsError(f"{self.path} is not a safetensors file: its header is not a JSON object ({error})") from error
        self.metadata: dict[str, str] = described.pop("__metadata__", {})
        if not isinstance(self.metadata, dict):
            raise SafetensorsError(f"{self.path} is not a safetensors file: its __metadata__ is not a JSON object")
        self._tensors = {name: self._entry(name, entry, 8 + length, size) for name, entry in described.items()}
        self._check_apart()

    def _check_apart(self) -> None:
        """No two tensors share bytes."""
        by_place = sorted((one for one in self._tensors.values() if one.size_bytes), key=lambda one: one.offset)
        for before, after in itertools.pairwise(by_place):
            if before.offset + before.size_bytes > after.offset:
                raise SafetensorsError(
                    f"{self.path}: the tensors {before.name!r} and {after.name!r} overlap; the file is damaged"
                )

    def _entry(self, name: str, entry: Any, start: int, size: int) -> StoredTensor:
        try:
            shape, (begin, end), kind = tuple(entry["shape"]), entry["data_offsets"], entry["dtype"]
            if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)) or not isinstance(kind, str):
                raise ValueError(entry)
        except (KeyError, TypeError, ValueError) as error:
            raise SafetensorsError(
                f"{self.path}: tensor {name!r} is described wrongly in the header: {str(entry)[:200]}"
            ) from error
        if kind not in _DTYPES:
            raise SafetensorsError(f"{self.path}: tensor {name!r} has dtype {kind}; known are {', '.join(_DTYPES)}")
        dtype = _DTYPES[kind]
        if end - begin != math.prod(shape) * dtype.itemsize or start + end > size:
            raise SafetensorsError(
                f"{self.path}: tensor {name!r} of shape {shape} and dtype {kind} has bytes {begin} to {end} of {size - start}; "
                "the file is damaged or incomplete: download it again"
            )
        return StoredTensor(self.path, name, shape, dtype, start + begin)

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
