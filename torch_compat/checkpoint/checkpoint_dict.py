"""Lightning's checkpoint dict in a file as stock's or in a sharded directory, and back.

The dict has stock Lightning's layout (``epoch``, ``global_step``, ``state_dict``, ``optimizer_states``, ``callbacks``, …).
Where every array is whole on every device it becomes one file, as ``torch.save`` writes it. Else arrays go to
:mod:`xlatrain.checkpoint` shard by shard, and everything else into ``host.pt``, which PyTorch's safe loader reads back. Layout
documented at
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
from torch_compat.checkpoint.checkpoint_file import file_writer, is_whole, read_file
from torch_compat.checkpoint.markers import StoredArray, TreePath, split, with_arrays
from xlatrain import checkpoint as sharded
from xlatrain.bridge.tensors.host import as_numpy, from_numpy
from xlatrain.bridge.tensors.lazy import LazyTensor, lazy_tensor

_AT_ONCE = 32 << 20
"""Bytes of arrays in a file up to which a save that need not wait does: hooks that copy or upload it find it, as stock's."""


def save_checkpoint_dict(
    path: str | os.PathLike[str],
    checkpoint: Mapping[str, Any],
    *,
    on_mesh: Callable[[torch.Tensor], jax.Array | None] | None = None,
    facts: Mapping[str, Any] | None = None,
    wait: bool = True,
    directory: bool | None = None,
) -> sharded.PendingSave:
    """Save a checkpoint dict; collective. Nothing in the dict is changed, and it may be changed as soon as this returns.

    Process 0's dict is what is stored of host state; the arrays in it must be the same on every process.

    Args:
        path: of the checkpoint.
        checkpoint: may hold ``jax.Array`` leaves anywhere in nested dicts, lists and tuples, beside anything that can be pickled.
        on_mesh: for a tensor in the dict, the array on the mesh with the tensor's present values, or None if it is a host tensor.
            Such a tensor is stored from the array and comes back with its own torch dtype.
        facts: see :func:`xlatrain.checkpoint.save`.
        wait: return when committed; otherwise when the arrays are off the devices (but small files are committed).
        directory: whether it is a directory; None: if an array is split over devices.

    Raises:
        TypeError: a value that cannot be pickled; names its key.
        ForeignPathError, CheckpointError: see :func:`xlatrain.checkpoint.save`.
    """
    arrays, host = split(checkpoint, on_mesh)
    if directory or (directory is None and not all(map(is_whole, arrays.values()))):
        return sharded.save(path, arrays, lambda: host_state.dump(host), facts=facts, wait=wait)
    wait = wait or sum(array.nbytes for array in arrays.values()) <= _AT_ONCE
    return sharded.save_file(path, lambda: file_writer(host, arrays), facts=facts, wait=wait)


def load_checkpoint_dict(
    path: str | os.PathLike[str] | IO[bytes], weights_only: bool | None = True, *, lazy: bool = False
) -> dict[str, Any]:
    """Read a checkpoint dict, from a directory or a file, ours or stock's; local to this process.

    Args:
        path: directory, file, URL of a file that fsspec opens, or an open binary file.
        weights_only: True or None reads with PyTorch's safe loader: of a stock file everything must be safe, of our own what is
            not comes as a value that raises when used. False unpickles: only for checkpoints that you trust.
        lazy: arrays of a directory come as tensors that are read when first used, for :func:`restore_arrays` to read onto their
            shards instead. They become unreadable when the checkpoint is removed or overwritten.

    Returns:
        The dict in stock layout; tensors on the CPU.

    Raises:
        CheckpointNotFoundError, ForeignPathError, CorruptCheckpointError: see :func:`xlatrain.checkpoint.open_checkpoint`.
        pickle.UnpicklingError: a stock file that the safe loader cannot read.
    """
    if not isinstance(path, (str, os.PathLike)):
        return read_file(path, "the file", weights_only)
    sharded.wait_for_save(path)
    if _is_file(path):
        with fsspec.open(os.fspath(path), "rb") as file:
            return read_file(file, os.fspath(path), weights_only)  # pyright: ignore[reportArgumentType]
    opened = sharded.open_checkpoint(path)
    if host_state.HOST_FILE not in opened.files:
        raise sharded.ForeignPathError(
            f"{opened.path} has no {host_state.HOST_FILE}: the engine saved it without torch; read it with "
            "xlatrain.checkpoint.open_checkpoint"
        )
    return read_opened(opened, weights_only, lazy=lazy)


def read_opened(opened: sharded.Checkpoint, weights_only: bool | None, *, lazy: bool) -> dict[str, Any]:
    """The dict of a checkpoint that is open; see :func:`load_checkpoint_dict`."""
    state = host_state.load(opened.files, weights_only=weights_only)
    return with_arrays(state, _Lazily(opened) if lazy else _Whole(opened))


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
    torch.save({key: value for key, value in state.items() if key != "xlatrain"}, os.fspath(file))  # stock does not have it


def _is_file(path: str | os.PathLike[str]) -> bool:
    text = os.fspath(path)
    if "://" in text:
        filesystem, inner = fsspec.core.url_to_fs(text)
        return filesystem.isfile(inner)
    return os.path.isfile(text)


class _Whole:
    """Reads every array at once; tied weights come back as one tensor."""

    def __init__(self, opened: sharded.Checkpoint) -> None:
        self._arrays = opened.restore_numpy()
        self._tensors: dict[StoredArray, torch.Tensor] = {}

    def __call__(self, stored: StoredArray) -> torch.Tensor:
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
    stored: StoredArray

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
        self._tensors: dict[StoredArray, torch.Tensor] = {}

    def __call__(self, stored: StoredArray) -> torch.Tensor:
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
