"""Host state as bytes that the safe loader reads back: nothing is unpickled unless the caller says that it is trusted.

What PyTorch's ``weights_only`` unpickler cannot read (an enum among the hyperparameters, a callback's own class) is stored apart
from the rest and named when it is saved, so that the rest stays readable safely.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torch_compat.checkpoint.untrusted import HARMLESS, StandIn, UntrustedValue, load_with_stand_ins

HOST_FILE = "host.pt"
TRUSTED_FILE = "trusted.pt"
_UNTRUSTED = "xlatrain.untrusted"
_PLAIN_CONTAINERS = (dict, collections.OrderedDict, list, tuple)


def dump(state: Any) -> dict[str, bytes]:
    """``state`` as files for a checkpoint: what the safe loader reads and, if there is any, what it does not.

    Warns with the keys that need ``weights_only=False`` to be read back.

    Raises:
        TypeError: a value cannot be pickled at all; names its key.
    """
    if (data := _safe_bytes(state)) is not None:
        return {HOST_FILE: data}
    safe, untrusted = _parted(state)
    return {HOST_FILE: _bytes(safe), TRUSTED_FILE: _bytes(untrusted)}


def pickled(state: Any) -> tuple[bytes, bool]:
    """``state`` as ``torch.save`` writes it, and whether the safe loader reads it; warns and raises as :func:`dump`."""
    if (data := _safe_bytes(state)) is not None:
        return data, True
    _parted(state)
    return _bytes(state), False


def unpickled(data: bytes) -> Any:
    """Inverse of :func:`pickled` where the safe loader reads it."""
    return _load_safely(io.BytesIO(data))


def _parted(state: Any) -> tuple[Any, dict[str, Any]]:
    untrusted: dict[str, Any] = {}
    safe = _set_apart(state, "", untrusted)
    if untrusted:
        keys = ", ".join(f"checkpoint{key} ({type(value).__qualname__})" for key, value in untrusted.items())
        warnings.warn(
            f"the checkpoint holds values that PyTorch's safe loader cannot read: {keys}. They are saved, and come back only "
            "with weights_only=False, which unpickles them: do that only with checkpoints that you trust. To have them read "
            "safely, store plain values (numbers, strings, lists, dicts, tensors) instead",
            stacklevel=3,
        )
    return safe, untrusted


def load(files: Mapping[str, bytes], *, weights_only: bool | None) -> Any:
    """Inverse of :func:`dump`; with ``weights_only`` what needs unpickling is an :class:`UntrustedValue`."""
    state = _load_safely(io.BytesIO(files[HOST_FILE]))
    if TRUSTED_FILE not in files:
        return state
    if is_trusted(weights_only):
        untrusted = torch.load(io.BytesIO(files[TRUSTED_FILE]), map_location="cpu", weights_only=False)
        return replace_leaves(state, _untrusted_key, lambda key, _: untrusted[key])
    return replace_leaves(state, _untrusted_key, lambda key, _: UntrustedValue(key))


def load_file(file: Any, name: str, *, weights_only: bool | None, stand_ins: bool = False) -> Any:
    """Read a single-file checkpoint, tensors on the CPU.

    Args:
        file: opened for reading.
        name: what it is called, in errors.
        weights_only: as of :func:`load`.
        stand_ins: what needs unpickling is an :class:`UntrustedValue`, and no error.

    Raises:
        UnreadableCheckpointError: the file is empty, cut off or something else.
        pickle.UnpicklingError: ``weights_only`` and the file holds what only unpickling can make; names the classes.
    """
    start = file.tell()
    try:
        with named_if_unreadable(file, name):
            return torch.load(file, map_location="cpu", weights_only=False) if is_trusted(weights_only) else _load_safely(file)
    except pickle.UnpicklingError as error:
        if is_trusted(weights_only) or isinstance(error, UnreadableCheckpointError):
            raise
        file.seek(start)
        if stand_ins:
            return _with_keys(load_with_stand_ins(file))
        raise pickle.UnpicklingError(
            f"{name} holds objects that PyTorch's safe loader cannot read ({_unsafe_globals(file) or error}); load it with "
            "weights_only=False if you trust where it comes from"
        ) from error


def _with_keys(state: Any) -> Any:
    """``state`` with the place of each stand-in said in it."""

    def match(node: Any) -> StandIn | None:
        return node if isinstance(node, StandIn) else None

    return replace_leaves(state, match, lambda _, path: UntrustedValue("".join(f"[{key!r}]" for key in path)))


class UnreadableCheckpointError(pickle.UnpicklingError, EOFError, RuntimeError):
    """A file that ``torch.save`` did not write, or not all of it; what torch raises are errors of these kinds, or a KeyError."""


@contextlib.contextmanager
def named_if_unreadable(file: Any, name: str) -> Iterator[None]:
    """Name ``file`` in the errors of ``torch.load`` in the block.

    Raises:
        UnreadableCheckpointError: instead of what torch and pickle say about bytes that are no checkpoint.
    """
    try:
        yield
    except (pickle.UnpicklingError, EOFError, KeyError, IndexError, UnicodeDecodeError, RuntimeError) as error:
        if not _is_about_bytes(error):
            raise
        raise UnreadableCheckpointError(
            f"{name} cannot be read as a checkpoint ({_in_short(error)}): expected a checkpoint directory, or a file that "
            f"torch.save wrote, found {_described(file)}"
        ) from error


def _in_short(error: Exception) -> str:
    """The fault that torch found, without its advice, which is about files that are checkpoints."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].rpartition("] . ")[2].strip()  # torch's checks name their lines
    first = next(iter(text.splitlines()), "").split(". ")[0].strip()
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _is_about_bytes(error: Exception) -> bool:
    """Whether the unpickler met what it never writes; other errors of these kinds are those of unpickled classes."""
    if isinstance(error, KeyError):
        return isinstance(error.args[0], int)  # a byte that is no operation of the unpickler
    said = ("Unsupported operand", "invalid load key", "truncated", "PytorchStreamReader", "Invalid magic number", "corrupt")
    said += ("Memo value not found", "file in archive")
    return not isinstance(error, RuntimeError | pickle.UnpicklingError) or any(words in str(error) for words in said)


def _described(file: Any) -> str:
    """A description of a file that is no checkpoint, and what to do next."""
    try:
        file.seek(0)
        head = file.read(16)
        size = file.seek(0, os.SEEK_END)
    except (OSError, ValueError):  # it cannot be read twice
        return "something else. Take another checkpoint"
    if head and head.isascii() and head.decode().replace("\n", " ").replace("\t", " ").isprintable():
        return f"a text of {size} bytes that begins with {head.decode()!r}. Pass the path of the checkpoint itself"
    return f"{size} bytes that begin with {head!r}. Is it cut off? Copy it again, or take another checkpoint"


def refuse_untrusted(state: Any) -> None:
    """Raise for the first :class:`UntrustedValue` in ``state``.

    Raises:
        UntrustedValueError: names its key.
    """

    def match(node: Any) -> UntrustedValue | None:
        return node if isinstance(node, UntrustedValue) else None

    replace_leaves(state, match, lambda value, _: value._refuse())


def is_trusted(weights_only: bool | None) -> bool:
    """Whether the caller asked for unpickling; None means the safe loader, unless PyTorch's environment variable differs."""
    if weights_only is None:
        return os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")
    return not weights_only


def replace_leaves(
    tree: Any, match: Callable[[Any], Any], replacement: Callable[[Any, Any], Any], path: tuple[Any, ...] = ()
) -> Any:
    """``tree`` with each node for which ``match(node)`` is not None replaced by ``replacement(match(node), path)``.

    Walks dicts, lists and tuples and their subclasses. A container in which nothing is replaced is the same object; others
    are shallow copies that keep type and attributes (a state dict's ``_metadata``).
    """
    if (found := match(tree)) is not None:
        return replacement(found, path)
    if isinstance(tree, dict):
        changed = {
            key: new
            for key, value in tree.items()
            if (new := replace_leaves(value, match, replacement, (*path, key))) is not value
        }
        return _copied_dict(tree, changed) if changed else tree
    if isinstance(tree, (list, tuple)):
        items = [replace_leaves(value, match, replacement, (*path, index)) for index, value in enumerate(tree)]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return _copied_sequence(tree, items)
    return tree


def _copied_dict(tree: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    new = copy.copy(tree)
    new.update(changed)
    return new


def _copied_sequence(tree: Any, items: list[Any]) -> Any:
    if isinstance(tree, list):
        new = copy.copy(tree)
        new[:] = items
        return new
    return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)


def _untrusted_key(node: Any) -> str | None:
    return node[_UNTRUSTED] if type(node) is dict and len(node) == 1 and _UNTRUSTED in node else None


def _set_apart(state: Any, key: str, untrusted: dict[str, Any]) -> Any:
    """``state`` with the smallest parts that the safe loader cannot read moved into ``untrusted``."""
    if _safe_bytes(state, key) is not None:
        return state
    if type(state) in _PLAIN_CONTAINERS:
        pairs = list(_children(state))
        children = {index: _set_apart(value, f"{key}[{index!r}]", untrusted) for index, value in pairs}
        return _copied_dict(state, children) if isinstance(state, dict) else _copied_sequence(state, list(children.values()))
    untrusted[key] = state
    return {_UNTRUSTED: key}


def _children(state: Any) -> Iterator[tuple[Any, Any]]:
    return iter(state.items()) if isinstance(state, dict) else enumerate(state)


def _safe_bytes(state: Any, key: str = "") -> bytes | None:
    """``state`` pickled, if the safe loader reads it; else None."""
    try:
        data = _bytes(state)
    except Exception as error:
        if type(state) in _PLAIN_CONTAINERS and len(state):
            return None  # the descent finds the child and names it
        raise TypeError(
            f"checkpoint{key} cannot be saved ({type(state).__qualname__}: {error}); leave it out in on_save_checkpoint, or, for "
            "a hyperparameter, with save_hyperparameters(ignore=[...])"
        ) from error
    try:
        _load_safely(io.BytesIO(data), map_location="meta")
    except pickle.UnpicklingError:
        return None
    return data


def _bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _load_safely(file: Any, map_location: str = "cpu") -> Any:
    with torch.serialization.safe_globals(HARMLESS):
        return torch.load(file, map_location=map_location, weights_only=True)


def _unsafe_globals(file: Any) -> str:
    with torch.serialization.safe_globals(HARMLESS):
        try:
            return ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        except (ValueError, RuntimeError):  # the format before zip files cannot be listed
            return ""
