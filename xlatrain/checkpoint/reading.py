"""Reading a checkpoint, onto any mesh and from any number of processes."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from xlatrain.checkpoint import filesystem
from xlatrain.checkpoint.arrays import LAYOUT, describe, flatten_names, read_numpy, read_sharded
from xlatrain.checkpoint.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError
from xlatrain.checkpoint.file_record import FileRecord
from xlatrain.checkpoint.manifest import ARRAYS, FILES, ArrayMetadata, file_digest, read_manifest, sha256
from xlatrain.checkpoint.pending import join_save_to
from xlatrain.checkpoint.record import read_any_record, read_record

_NEXT_STEP = "copy the checkpoint again, or restore another one"


class HostFiles(Mapping[str, bytes]):
    """The host state of a checkpoint: name → contents, read and verified when asked for."""

    def __init__(self, directory: epath.Path, digests: Mapping[str, str]) -> None:
        self._directory = directory
        self._digests = digests

    def __getitem__(self, name: str) -> bytes:
        digest = self._digests[name]
        path = self._directory / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path} is missing; was the checkpoint removed or saved again meanwhile?") from None
        if sha256(data) != digest:
            raise CorruptCheckpointError(f"{path} does not have the contents that were committed; restore another checkpoint")
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)


class Checkpoint:
    """A committed checkpoint, verified to be complete. Make it with :func:`open_checkpoint`.

    Attributes:
        path: its directory.
        files: the host state, name → bytes; a lazy mapping.
        committed_ns: when it was committed, by its commit record, in nanoseconds since the epoch.
        facts: what the save was told about it.
        versions: the releases that wrote it.
        size_bytes: of all its files.
    """

    def __init__(self, path: epath.Path) -> None:
        self.path = path
        record = read_record(path)
        payload = path / record.payload
        manifest = read_manifest(payload, record.manifest_sha256)
        self.committed_ns = record.committed_ns
        self.facts: Mapping[str, Any] = manifest.facts
        self.versions: Mapping[str, str] = manifest.versions
        self.size_bytes = sum(manifest.sizes.values())
        digests = {
            name.removeprefix(f"{FILES}/"): digest for name, digest in manifest.digests.items() if name.startswith(f"{FILES}/")
        }
        self.files: Mapping[str, bytes] = HostFiles(payload / FILES, digests)
        self._arrays = payload / ARRAYS
        self._layout = {name: manifest.digests[f"{ARRAYS}/{name}"] for name in LAYOUT if f"{ARRAYS}/{name}" in manifest.digests}
        self._layout_checked = False
        self._metadata = dict(manifest.arrays)

    def array_metadata(self) -> dict[str, ArrayMetadata]:
        """Name → shape and dtype of every stored array. Names are the saved pytree's keys joined by ``/``."""
        return dict(self._metadata)

    def matching(self, *patterns: str) -> list[str]:
        """Names of the stored arrays that match any of the patterns of the shell (``state_dict/encoder.*``), as stored.

        Raises:
            CheckpointMismatchError: a pattern that matches nothing, e.g. for a typing error.
        """
        for pattern in patterns:
            if not fnmatch.filter(self._metadata, pattern):
                raise CheckpointMismatchError(f"{self.path}: no arrays match {pattern!r}; {self._stored_names()}")
        return [name for name in self._metadata if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]

    def restore(
        self,
        template: Any,
        *,
        subset: bool = False,
        cast: bool = False,
        stored_as: Callable[[str], str] | None = None,
    ) -> Any:
        """Read arrays directly onto their shards; local to this process, so every process restores its own shards.

        What is read is compared with the checksums that were stored with it.

        Args:
            template: a pytree with the structure to return; its leaves (``jax.ShapeDtypeStruct`` with ``sharding``, or
                ``jax.Array``) give shape, dtype and sharding, on any mesh.
            subset: the template may leave stored arrays out.
            cast: convert to the template's dtype where the stored one differs.
            stored_as: for a name of the template, the name of the array in the checkpoint, where they differ.

        Returns:
            The template's structure with ``jax.Array`` leaves.

        Raises:
            CheckpointMismatchError: lists every name that is missing, unexpected, or has another shape or dtype.
            ValueError: a leaf has no sharding, or one that does not divide it, or needs x64.
            CorruptCheckpointError: the stored data cannot be read, or is not what was saved; names an array that it is part of.
        """
        named, structure = flatten_names(template)
        for name, leaf in named.items():
            _check_leaf(name, leaf)
        sources = {name: stored_as(name) if stored_as else name for name in named}
        self._check_match(named, sources, subset=subset, cast=cast)
        arrays: dict[str, jax.Array] = {}
        for group in _without_duplicates(sources):  # Orbax reads a name once; two leaves may ask for it
            read = self._read_sharded({source: named[name] for name, source in group.items()})
            arrays |= {name: _cast(read[source], named[name]) for name, source in group.items()}
        return jax.tree.unflatten(structure, [arrays[name] for name in named])

    def _check_layout(self) -> None:
        """Orbax's own description of the arrays, by which it reads them, has no checksum of its own."""
        if not self._layout_checked:
            for name, digest in self._layout.items():
                if file_digest(self._arrays / name) != digest:
                    raise CorruptCheckpointError(f"{self._arrays / name} differs from the one that was committed; {_NEXT_STEP}")
            self._layout_checked = True

    def restore_numpy(self, names: list[str] | None = None) -> dict[str, np.ndarray]:
        """Read whole arrays into host memory by name (default: all); typed random keys come as their uint32 bits.

        Raises:
            CheckpointMismatchError: a name is not stored.
            CorruptCheckpointError: the stored data cannot be read, or is not what was saved.
        """
        names = list(self._metadata) if names is None else names
        if missing := [name for name in names if name not in self._metadata]:
            raise CheckpointMismatchError(f"{self.path}: no arrays named {_shown(missing)}; {self._stored_names()}")
        return self._read_numpy(names)

    def _read_sharded(self, template: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Arrays of stored names, of the template's shapes and on its shards."""
        self._check_layout()
        return read_sharded(self._arrays, self._metadata, template)

    def _read_numpy(self, names: list[str]) -> dict[str, np.ndarray]:
        self._check_layout()
        return read_numpy(self._arrays, {name: self._metadata[name] for name in names})

    def _check_match(self, named: Mapping[str, Any], sources: Mapping[str, str], *, subset: bool, cast: bool) -> None:
        missing = [_renamed(name, source) for name, source in sources.items() if source not in self._metadata]
        asked = set(sources.values())
        unexpected = [] if subset else [name for name in self._metadata if name not in asked]
        differing = [
            text
            for name, leaf in named.items()
            if (source := sources[name]) in self._metadata
            for text in _differences(_renamed(name, source), describe(name, leaf), self._metadata[source], cast=cast)
        ]
        problems = []
        if missing:
            problems.append(f"asked for, but not in the checkpoint: {_shown(missing)}")
        if unexpected:
            problems.append(f"in the checkpoint, but not asked for: {_shown(unexpected)} (subset=True leaves them out)")
        if differing:
            problems.append("; ".join(differing))
        if problems:
            raise CheckpointMismatchError(f"{self.path} does not match the template: " + "; ".join(problems))

    def _stored_names(self) -> str:
        return f"stored are {_shown(list(self._metadata))}" if self._metadata else "it has no arrays"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a committed checkpoint and verify that all its files are there in full length. Local: not collective.

    ::

        save("first.ckpt", {"weight": jax.numpy.ones((8, 4))}, wait=True)
        opened = open_checkpoint("first.ckpt")
        weight = opened.restore_numpy()["weight"]

    If this process has a save to the path in flight, it is waited for.

    Raises:
        CheckpointNotFoundError: nothing there, or nothing that was committed.
        ForeignPathError: a file, or a directory of something else.
        CorruptCheckpointError: lists the files that are missing or truncated.
    """
    target = filesystem.as_path(path)
    join_save_to(target)
    return Checkpoint(target)


def saved_facts(path: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """The facts that the checkpoint at the path was saved with, e.g. its step; None where none can be opened. Cheap."""
    target = filesystem.as_file_path(path)
    try:
        record = read_any_record(target)
        return record.facts if isinstance(record, FileRecord) else open_checkpoint(path).facts
    except CheckpointError:
        return None


def _check_leaf(name: str, leaf: Any) -> None:
    describe(name, leaf)
    if getattr(leaf, "sharding", None) is None:
        raise ValueError(
            f"template[{name!r}] has no sharding: give jax.ShapeDtypeStruct(shape, dtype, sharding=...), or read whole "
            "arrays with restore_numpy()"
        )
    try:
        leaf.sharding.shard_shape(tuple(leaf.shape))
    except ValueError as error:
        raise ValueError(f"template[{name!r}] cannot be sharded as asked: {error}") from None
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
        raise ValueError(
            f"template[{name!r}] has dtype {leaf.dtype}, which JAX has only with jax_enable_x64; enable it, ask for "
            f"{jax.dtypes.canonicalize_dtype(leaf.dtype)} with cast=True, or read it with restore_numpy()"
        )


def _differences(name: str, asked: ArrayMetadata, stored: ArrayMetadata, *, cast: bool) -> Iterator[str]:
    if asked.shape != stored.shape:
        yield f"{name}: expected shape {asked.shape}, stored {stored.shape}"
    both_numbers = stored.key_impl is None and not asked.dtype.startswith("key<")
    if asked.dtype != stored.dtype and not (cast and both_numbers):
        hint = " (cast=True converts)" if both_numbers else ""
        yield f"{name}: expected dtype {asked.dtype}, stored {stored.dtype}{hint}"


def _without_duplicates(sources: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """``sources`` in parts in each of which every stored name occurs once."""
    remaining = dict(sources)
    while remaining:
        first = {source: name for name, source in reversed(remaining.items())}
        group = {name: source for source, name in first.items()}
        yield group
        remaining = {name: source for name, source in remaining.items() if name not in group}


def _renamed(name: str, source: str) -> str:
    return name if name == source else f"{name} (stored as {source})"


def _cast(value: jax.Array, leaf: Any) -> jax.Array:
    return value if value.dtype == leaf.dtype else value.astype(leaf.dtype)


def _shown(names: list[str]) -> str:
    return ", ".join(names)
