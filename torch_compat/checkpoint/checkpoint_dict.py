"""Lightning's checkpoint dict in our sharded directories, and back.

The dict has stock Lightning's layout (``epoch``, ``global_step``, ``state_dict``, ``optimizer_states``, ``callbacks``, …).
Tensors whose values live on the mesh go to :mod:`xlatrain.checkpoint` shard by shard; everything else goes into ``host.pt``,
which PyTorch's safe loader reads back. Layout documented at
https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html#contents-of-a-checkpoint
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import IO, Any

import fsspec
import jax
import numpy as np
import torch

from torch_compat.checkpoint import host_state, stock_loops
from torch_compat.checkpoint.array_tensors import array_behind
from xlatrain import checkpoint as sharded
from xlatrain.bridge.tensors.dtypes import torch_dtype
from xlatrain.bridge.tensors.host import as_numpy, from_numpy
from xlatrain.bridge.tensors.live import LazyTensor, lazy_tensor, live_array

TreePath = tuple[Any, ...]
"""Keys from the checkpoint dict down to a leaf, e.g. ``("state_dict", "fc.weight")``."""

_ARRAY = "xlatrain.array"


def save_checkpoint_dict(
    path: str | os.PathLike[str],
    checkpoint: Mapping[str, Any],
    *,
    on_mesh: Callable[[torch.Tensor], jax.Array | None] | None = None,
    facts: Mapping[str, Any] | None = None,
    wait: bool = True,
) -> sharded.PendingSave:
    """Save a checkpoint dict; collective. Nothing in the dict is changed, and it may be changed as soon as this returns.

    Process 0's dict is what is stored of host state; the arrays in it must be the same on every process.

    Args:
        path: the checkpoint directory.
        checkpoint: may hold ``jax.Array`` leaves anywhere in nested dicts, lists and tuples, beside anything that can be pickled.
        on_mesh: for a tensor in the dict, the array on the mesh with the tensor's present values, or None if it is a host tensor.
            Such a tensor is stored from the array and comes back with its own torch dtype.
        facts: see :func:`xlatrain.checkpoint.save`.
        wait: return when committed; otherwise when the arrays are off the devices.

    Raises:
        TypeError: a value that cannot be pickled; names its key.
        ForeignPathError, CheckpointError: see :func:`xlatrain.checkpoint.save`.
    """
    arrays, host = _split(checkpoint, on_mesh)
    return sharded.save(path, arrays, lambda: host_state.dump(host), facts=facts, wait=wait)


def load_checkpoint_dict(
    path: str | os.PathLike[str] | IO[bytes], weights_only: bool | None = True, *, lazy: bool = False
) -> dict[str, Any]:
    """Read a checkpoint dict, from a directory of ours or a stock single-file ``.ckpt``; local to this process.

    Args:
        path: directory, file, URL of a file that fsspec opens, or an open binary file.
        weights_only: True or None reads with PyTorch's safe loader: of a stock file everything must be safe, of our directories
            what is not comes as a value that raises when used. False unpickles: only for checkpoints that you trust.
        lazy: stored arrays come as tensors that are read when first used, for :func:`restore_arrays` to read onto their shards
            instead. They become unreadable when the checkpoint is removed or overwritten.

    Returns:
        The dict in stock layout; tensors on the CPU.

    Raises:
        CheckpointNotFoundError, ForeignPathError, CorruptCheckpointError: see :func:`xlatrain.checkpoint.open_checkpoint`.
        pickle.UnpicklingError: a stock file that the safe loader cannot read.
    """
    if not isinstance(path, (str, os.PathLike)):
        return host_state.load_stock_file(path, "the file", weights_only=weights_only)
    if _is_stock_file(path):
        with fsspec.open(os.fspath(path), "rb") as file:
            return host_state.load_stock_file(file, os.fspath(path), weights_only=weights_only)
    opened = sharded.open_checkpoint(path)
    if host_state.HOST_FILE not in opened.files:
        raise sharded.ForeignPathError(
            f"{opened.path} has no {host_state.HOST_FILE}: the engine saved it without torch; read it with "
            "xlatrain.checkpoint.open_checkpoint"
        )
    state = host_state.load(opened.files, weights_only=weights_only)
    read = _Lazily(opened) if lazy else _Whole(opened)
    return host_state.replace_leaves(state, _stored_array, lambda stored, _: read(stored))


def restore_arrays(
    checkpoint: Mapping[str, Any], templates: Mapping[TreePath, jax.ShapeDtypeStruct]
) -> dict[TreePath, jax.Array]:
    """Place leaves of a loaded checkpoint dict on the mesh, converted to the template's dtype as torch's ``copy_`` converts.

    What :func:`load_checkpoint_dict` read lazily and nobody used goes from the directory directly onto its shards; any other
    tensor or number (a stock checkpoint, a hook's replacement) is placed from host memory.

    Args:
        checkpoint: the dict.
        templates: path of each leaf → its shape, dtype and sharding on the mesh.

    Raises:
        CheckpointMismatchError: lists every path that is missing or has another shape.
    """
    leaves = _leaves(checkpoint, templates)
    stored: dict[sharded.Checkpoint, dict[TreePath, str]] = {}
    restored: dict[TreePath, jax.Array] = {}
    for path, leaf in leaves.items():
        reference = _unread(leaf)
        if reference is None:
            restored[path] = _place(leaf, templates[path])
        else:
            stored.setdefault(reference.checkpoint, {})[path] = reference.stored.name
    for opened, names in stored.items():
        restored.update(_restore_stored(opened, names, templates))
    return {path: restored[path] for path in templates}


def export_checkpoint_file(path: str | os.PathLike[str], file: str | os.PathLike[str], weights_only: bool | None = True) -> None:
    """Write a checkpoint directory as one ``.ckpt`` file that stock Lightning continues from, or ``torch.load`` reads.

    The whole checkpoint must fit in host memory. With ``weights_only`` a checkpoint that holds what the safe loader cannot read
    is refused, rather than exported without it.

    Raises:
        UntrustedValueError: names a value that needs ``weights_only=False``.
    """
    state = load_checkpoint_dict(path, weights_only)
    host_state.refuse_untrusted(state)
    if "loops" in state and stock_loops.is_ours(state["loops"]):
        state = {**state, "loops": stock_loops.to_stock(state["loops"])}
        state.pop("xlatrain", None)  # random streams that stock does not have
    torch.save(state, os.fspath(file))


@dataclass(frozen=True)
class _StoredArray:
    """The entry of ``host.pt`` in place of an array."""

    name: str
    dtype: torch.dtype


def _split(
    checkpoint: Mapping[str, Any], on_mesh: Callable[[torch.Tensor], jax.Array | None] | None
) -> tuple[dict[str, jax.Array], Any]:
    """The arrays by name, and the dict with markers in their place. An array that occurs twice (tied weights) is stored once."""
    arrays: dict[str, jax.Array] = {}
    names: dict[int, str] = {}

    def match(node: Any) -> tuple[jax.Array | torch.nn.Parameter, torch.dtype] | None:
        if isinstance(node, jax.Array):
            return node, torch_dtype(node.dtype)
        if isinstance(node, torch.Tensor) and on_mesh is not None and (array := on_mesh(node)) is not None:
            return array, node.dtype
        if isinstance(node, torch.Tensor) and (array := array_behind(node)) is not None:
            return array, node.dtype
        if isinstance(node, torch.Tensor) and (array := live_array(node)) is not None:  # left on the mesh by an earlier run
            return array, node.dtype
        if isinstance(node, torch.nn.Parameter):
            return node, node.dtype
        if isinstance(node, dict) and _ARRAY in node:
            raise ValueError(f"the checkpoint dict holds a dict with the key {_ARRAY!r}, which is reserved; use another key")
        return None

    def replacement(found: tuple[jax.Array | torch.nn.Parameter, torch.dtype], path: TreePath) -> Any:
        array, dtype = found
        if isinstance(array, torch.nn.Parameter):  # a host parameter; in a stock state_dict it is a plain tensor
            return array.detach() if path[0] == "state_dict" else array
        if id(array) not in names:
            names[id(array)] = name = _unique("/".join(str(key) for key in path), arrays)
            arrays[name] = array
        return {_ARRAY: names[id(array)], "dtype": dtype}

    return arrays, host_state.replace_leaves(dict(checkpoint), match, replacement)


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    """``name``, or with a number if the keys 0 and "0" of one dict both lead to it."""
    candidate, number = name, 1
    while candidate in taken:
        candidate, number = f"{name}~{number}", number + 1
    return candidate


def _stored_array(node: Any) -> _StoredArray | None:
    return _StoredArray(node[_ARRAY], node["dtype"]) if type(node) is dict and _ARRAY in node else None


def _is_stock_file(path: str | os.PathLike[str]) -> bool:
    text = os.fspath(path)
    if "://" in text:
        filesystem, inner = fsspec.core.url_to_fs(text)
        return filesystem.isfile(inner)
    return os.path.isfile(text)


class _Whole:
    """Reads every array at once; tied weights come back as one tensor."""

    def __init__(self, opened: sharded.Checkpoint) -> None:
        self._arrays = opened.restore_numpy()
        self._tensors: dict[_StoredArray, torch.Tensor] = {}

    def __call__(self, stored: _StoredArray) -> torch.Tensor:
        if stored not in self._tensors:
            self._tensors[stored] = from_numpy(self._arrays[stored.name]).to(stored.dtype)
        return self._tensors[stored]


_damage: ContextVar[list[sharded.CorruptCheckpointError] | None] = ContextVar("damage", default=None)


@contextmanager
def raising_damage() -> Iterator[None]:
    """Raise the damage that ``module.load_state_dict(state)`` finds: it would list whatever goes wrong in one ``RuntimeError``.

    Raises:
        CorruptCheckpointError: a tensor could not be read; names the array.
    """
    damage: list[sharded.CorruptCheckpointError] = []
    token = _damage.set(damage)
    try:
        yield
    except RuntimeError as error:
        if damage:
            raise damage[0] from error
        raise
    finally:
        _damage.reset(token)


@dataclass(frozen=True)
class _Fetch:
    """Reads a lazy tensor's values; says where they are, for whoever wants them on shards instead."""

    checkpoint: sharded.Checkpoint
    stored: _StoredArray

    def __call__(self) -> torch.Tensor:
        name = self.stored.name
        try:
            return from_numpy(self.checkpoint.restore_numpy([name])[name]).to(self.stored.dtype)
        except sharded.CorruptCheckpointError as error:
            if (found := _damage.get()) is not None:
                found.append(error)
            raise


class _Lazily:
    """Makes tensors that read their array when first used."""

    def __init__(self, opened: sharded.Checkpoint) -> None:
        self._opened = opened
        self._metadata = opened.array_metadata()
        self._tensors: dict[_StoredArray, torch.Tensor] = {}

    def __call__(self, stored: _StoredArray) -> torch.Tensor:
        if stored not in self._tensors:
            shape = self._metadata[stored.name].shape
            self._tensors[stored] = lazy_tensor(shape, stored.dtype, _Fetch(self._opened, stored))
        return self._tensors[stored]


def _unread(leaf: Any) -> _Fetch | None:
    """The source of a lazy tensor's values, if nobody has read (and perhaps changed) them; else None."""
    return leaf._fetch if isinstance(leaf, LazyTensor) and isinstance(leaf._fetch, _Fetch) else None


def _leaves(checkpoint: Mapping[str, Any], templates: Mapping[TreePath, jax.ShapeDtypeStruct]) -> dict[TreePath, Any]:
    leaves: dict[TreePath, Any] = {}
    problems = []
    for path, template in templates.items():
        try:
            leaf = _at(checkpoint, path)
        except (KeyError, IndexError, TypeError):
            problems.append(f"{_shown(path)} is missing")
            continue
        shape = tuple(leaf.shape) if hasattr(leaf, "shape") else ()
        if shape != tuple(template.shape):
            problems.append(f"{_shown(path)}: expected shape {tuple(template.shape)}, found {shape}")
        leaves[path] = leaf
    if problems:
        raise sharded.CheckpointMismatchError("the checkpoint does not match the model or optimizer: " + "; ".join(problems))
    return leaves


def _at(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _shown(path: TreePath) -> str:
    return "checkpoint" + "".join(f"[{key!r}]" for key in path)


def _place(leaf: Any, template: jax.ShapeDtypeStruct) -> jax.Array:
    if isinstance(leaf, torch.Tensor):
        leaf = as_numpy(leaf.detach().cpu())
    values = np.asarray(leaf).astype(template.dtype)
    return jax.make_array_from_callback(tuple(template.shape), template.sharding, lambda index: values[index])


def _restore_stored(
    opened: sharded.Checkpoint, names: Mapping[TreePath, str], templates: Mapping[TreePath, jax.ShapeDtypeStruct]
) -> dict[TreePath, jax.Array]:
    """Tied weights may be asked for at several paths; each is read, so that each can be donated on its own."""
    restored: dict[TreePath, jax.Array] = {}
    remaining = dict(names)
    while remaining:
        batch = {name: path for path, name in remaining.items()}
        for name, array in opened.restore(
            {name: templates[path] for name, path in batch.items()}, subset=True, cast=True
        ).items():
            restored[batch[name]] = array
            del remaining[batch[name]]
    return restored
