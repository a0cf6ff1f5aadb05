"""A file that ``torch.save`` wrote, ours or another program's, as the commands of ``xlatrain ckpt`` look at one.

Read without torch, which takes seconds to import, and without unpickling: nothing that the file names is imported or called.
Format: https://docs.pytorch.org/docs/stable/notes/serialization.html#serialized-file-format-for-torch-save
"""

from __future__ import annotations

import collections
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from xlatrain.checkpoint import ArrayMetadata, CorruptCheckpointError, check_body

_STORAGES = {
    "DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16, "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64, "IntStorage": np.int32, "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8,
    "BoolStorage": np.bool_, "ComplexFloatStorage": np.complex64, "ComplexDoubleStorage": np.complex128,
}  # fmt: skip
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
_DTYPES += ("float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "bool")


@dataclass(frozen=True)
class _Tensor:
    """A tensor's place in the file."""

    storage: str
    dtype: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Other:
    """In place of anything that is no tensor: takes what the object would have been made of, and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> _Other:
        return object.__new__(cls)

    def _take(self, *_: Any, **__: Any) -> Any:
        return _Other()

    __call__ = __setstate__ = __setitem__ = append = extend = add = _take


class _Tensors(pickle.Unpickler):
    """Finds tensors in a pickle."""

    def find_class(self, module: str, name: str, /) -> Any:
        known = {
            "collections.OrderedDict": collections.OrderedDict,
            "torch._utils._rebuild_tensor_v2": _tensor,
            "torch._utils._rebuild_tensor_v3": _tensor,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
        }
        full = f"{module}.{name}"
        if module in ("torch", "torch.storage") and (name in _STORAGES or name in _DTYPES or name == "UntypedStorage"):
            return name
        return known.get(full, _Other)

    def persistent_load(self, pid: Any, /) -> tuple[str, str]:
        _, kind, key, *_ = pid
        return str(key), str(kind)


def _tensor(storage: tuple[str, str], offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: Any) -> Any:
    key, kind = storage
    name = next((one for one in rest if isinstance(one, str) and one in _DTYPES), "")
    dtype = _STORAGES.get(kind) or (np.dtype(getattr(ml_dtypes, name, None) or name).type if name else None)
    return _Other() if dtype is None else _Tensor(key, dtype, int(offset), tuple(shape), tuple(strides))


class TorchFile:
    """The members of :class:`xlatrain.checkpoint.Checkpoint` that say what is in it. Its arrays are the file's tensors, by the
    keys on the way to them joined by ``/``; of tied ones each name counts.

    Raises:
        CorruptCheckpointError: it is ours, and not what was committed; or it is no whole archive.
    """

    files: Mapping[str, bytes] = {}

    def __init__(self, path: str) -> None:
        self.path = epath.Path(path)
        with open(path, "rb") as file:
            record = check_body(path, file)
        self.committed_ns = record.committed_ns if record else 0
        self.facts: Mapping[str, Any] = record.facts if record else {}
        self.versions: Mapping[str, str] = record.versions if record else {}
        self.size_bytes = os.path.getsize(path)
        try:
            self._archive = zipfile.ZipFile(path)
            (pickled,) = (name for name in self._archive.namelist() if name.endswith("/data.pkl"))
            self._root = pickled.removesuffix("data.pkl")
            with self._archive.open(pickled) as file:
                self._tensors = dict(_walk(_Tensors(file).load(), ()))
        except Exception as error:  # of a pickle that nobody wrote, anything
            raise CorruptCheckpointError(
                f"{path} cannot be read as a file that torch.save wrote ({type(error).__name__}: {error}); copy it again, or "
                "take another checkpoint"
            ) from error

    def array_metadata(self) -> dict[str, ArrayMetadata]:
        """Name → shape and dtype of every tensor."""
        return {name: ArrayMetadata(one.shape, np.dtype(one.dtype).name) for name, one in self._tensors.items()}

    def restore_numpy(self, names: list[str]) -> dict[str, np.ndarray]:
        """Tensors by name."""
        return {name: self._read(self._tensors[name]) for name in names}

    def _read(self, tensor: _Tensor) -> np.ndarray:
        values = np.frombuffer(self._archive.read(f"{self._root}data/{tensor.storage}"), tensor.dtype)[tensor.offset :]
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        if 0 in tensor.shape:
            return np.zeros(tensor.shape, tensor.dtype)
        if not 0 <= last < len(values) or min(tensor.strides, default=0) < 0:
            raise CorruptCheckpointError(f"{self.path}: a tensor of shape {tensor.shape} lies outside of its storage")
        strides = [stride * values.itemsize for stride in tensor.strides]
        return np.lib.stride_tricks.as_strided(values, tensor.shape, strides, writeable=False)


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, _Tensor]]:
    if isinstance(node, _Tensor):
        yield "/".join(path), node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _walk(value, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _walk(value, (*path, str(index)))
