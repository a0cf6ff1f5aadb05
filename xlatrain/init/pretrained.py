"""Pretrained weights straight onto their shards: each process reads the bytes of its own shards only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xlatrain.init.joined import Readable
from xlatrain.init.safetensors import SafetensorsError, SafetensorsFile, StoredTensor

NameMapping = Callable[[str], str | None] | Mapping[str, str] | None
"""A stored name → the parameter's path: a function (None leaves the tensor out), or a dict of prefixes to replace."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class PretrainedMismatchError(ValueError):
    """Stored tensors and parameters do not fit: lists every missing, unexpected and mis-shaped name."""


def open_safetensors(path: str | os.PathLike[str], names: NameMapping = None) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, by parameter path; only headers are read.

    Args:
        path: one ``.safetensors`` file, an index (``….safetensors.index.json``), or a directory of Hugging Face's layout that has
            ``model.safetensors`` or ``model.safetensors.index.json``.
        names: how stored names become parameter paths.

    Raises:
        FileNotFoundError: there is none of these.
        SafetensorsError: a file is damaged, or the index names a tensor that its file lacks.
        ValueError: two stored names lead to one path.
    """
    rename = _renaming(names)
    opened: dict[str, StoredTensor] = {}
    for name, stored in _stored(Path(path)).items():
        target = rename(name)
        if target is None:
            continue
        if target in opened:
            raise ValueError(f"names maps both {opened[target].name!r} and {name!r} to {target!r}; map each to its own path")
        opened[target] = stored
    return opened


def load_safetensors(
    path: str | os.PathLike[str], templates: Mapping[str, Any], *, names: NameMapping = None, strict: bool = True
) -> dict[str, jax.Array]:
    """Read a checkpoint directly onto its shards.

    Each process reads only the rows that its own devices hold, one array after the other, and converts them on the way.

    Args:
        path: see :func:`open_safetensors`.
        templates: parameter path → something with ``shape``, ``dtype`` and ``sharding``, e.g. ``jax.ShapeDtypeStruct``.
        names: how stored names become parameter paths.
        strict: also refuse stored tensors that no template asks for, and templates that nothing is stored for; without, the
            result has what is in both.

    Raises:
        PretrainedMismatchError: lists every missing, unexpected and mis-shaped name.
        FileNotFoundError, SafetensorsError, ValueError: see :func:`open_safetensors`.
    """
    opened = open_safetensors(path, names)
    check_match(path, opened, {name: tuple(template.shape) for name, template in templates.items()}, strict=strict)
    return {name: place_stored(opened[name], template) for name, template in templates.items() if name in opened}


def place_stored(stored: Readable, template: Any) -> jax.Array:
    """Put a stored tensor on the shards of ``template.sharding``, as ``template.dtype``."""
    dtype = np.dtype(template.dtype)
    read: dict[Any, np.ndarray] = {}

    def shard(index: Any) -> np.ndarray:
        key = tuple((part.start, part.stop) for part in index)
        if key not in read:  # replicas of a shard on several devices are read once
            read[key] = stored.read(tuple(index)).astype(dtype, copy=False)
        return read[key]

    array = jax.make_array_from_callback(tuple(template.shape), template.sharding, shard)
    array.block_until_ready()  # the values that were read can be freed only then
    return array


def check_match(
    path: str | os.PathLike[str], opened: Mapping[str, Readable], shapes: Mapping[str, tuple[int, ...]], *, strict: bool
) -> None:
    """Compare the stored tensors with those wanted.

    Raises:
        PretrainedMismatchError: lists every name that does not fit.
    """
    lines = []
    if strict:
        lines += [f"  missing: {name} {shapes[name]}" for name in shapes if name not in opened]
        lines += [
            f"  unexpected: {name}{_was(name, stored)} {stored.shape}" for name, stored in opened.items() if name not in shapes
        ]
    lines += [
        f"  wrong shape: {name}{_was(name, opened[name])} is {opened[name].shape}, expected {shape}"
        for name, shape in shapes.items()
        if name in opened and opened[name].shape != shape
    ]
    if lines:
        hint = _prefix_hint(opened, shapes) or _shape_hint(opened, shapes)
        if hint is None and strict:
            hint = "Map names with names=, or take the names that fit with strict=False."
        elif hint is None:
            hint = "strict=False leaves out names, not shapes: change the module, or let a function names= map them to None."
        raise PretrainedMismatchError(
            f"the tensors of {os.fspath(path)} do not fit the module:\n" + "\n".join(lines) + f"\n{hint}"
        )


def _prefix_hint(opened: Mapping[str, Readable], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The ``names`` that finds most missing parameters, if one prefix is what their stored names differ in."""
    missing = [name for name in shapes if name not in opened]
    unexpected = [name for name, stored in opened.items() if name not in shapes and stored.name == name]
    prefixes = {(stored.removesuffix(name), "") for name in missing[:8] for stored in unexpected if stored.endswith(f".{name}")}
    prefixes |= {("", name.removesuffix(stored)) for name in missing[:8] for stored in unexpected if name.endswith(f".{stored}")}
    wanted = set(missing)
    found = {
        (old, new): sum(new + name[len(old) :] in wanted for name in unexpected if name.startswith(old)) for old, new in prefixes
    }
    if not found:
        return None
    (old, new), count = max(found.items(), key=lambda one: (one[1], one[0]))
    return f"names={{{old!r}: {new!r}}} would find {count} of the {len(missing)} that are missing."


def _shape_hint(opened: Mapping[str, Readable], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The ``names`` that finds every missing parameter, if shapes leave one choice: a head that is stored by another name."""
    missing = {name: shape for name, shape in shapes.items() if name not in opened}
    unexpected = {name: stored.shape for name, stored in opened.items() if name not in shapes and stored.name == name}
    names = {}
    for name, shape in missing.items():
        fitting = [stored for stored, found in unexpected.items() if found == shape]
        if len(fitting) != 1 or [*missing.values()].count(shape) != 1:
            return None
        names[fitting[0]] = name
    return f"Their shapes would fit with names={names}." if names else None


def _was(name: str, stored: Readable) -> str:
    return "" if stored.name == name else f" (stored as {stored.name})"


def _renaming(names: NameMapping) -> Callable[[str], str | None]:
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    prefixes = sorted(names.items(), key=lambda pair: -len(pair[0]))

    def rename(name: str) -> str:
        for old, new in prefixes:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    return rename


def _is_beside(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not any(mark in name for mark in "/\\\0")


def _stored(path: Path) -> dict[str, StoredTensor]:
    if path.is_dir():
        found = next((path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()), None)
        if found is None:
            raise FileNotFoundError(f"{path} has neither {_SINGLE} nor {_INDEX}; give the file itself if it has another name")
        path = found
    if not path.exists():
        raise FileNotFoundError(
            f"there is no file or directory {str(path)!r}; nothing is downloaded here: for a model of the Hugging Face hub "
            "give the directory that huggingface_hub.snapshot_download returns"
        )
    if path.suffix != ".json":
        return dict(SafetensorsFile(path))
    try:
        weight_map: dict[str, str] = dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SafetensorsError(f"{path} is not an index of safetensors files: it has no weight_map ({error})") from error
    if odd := sorted({repr(name)[:80] for name in weight_map.values() if not _is_beside(name)}):
        raise SafetensorsError(f"{path} names files that cannot lie beside it: {', '.join(odd[:5])}; do not use it")
    if absent := sorted({name for name in weight_map.values() if not (path.parent / name).is_file()}):
        raise FileNotFoundError(f"{path} names files that are not beside it: {', '.join(absent)}")
    files = {name: SafetensorsFile(path.parent / name) for name in sorted(set(weight_map.values()))}
    if missing := [f"{name} in {file}" for name, file in weight_map.items() if name not in files[file]]:
        raise SafetensorsError(f"{path} names tensors that are not in their files: {', '.join(missing)}")
    return {name: files[file][name] for name, file in weight_map.items()}
