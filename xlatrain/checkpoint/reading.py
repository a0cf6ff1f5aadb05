"""Reading a checkpoint, onto any mesh and from any number of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from xlatrain.checkpoint import filesystem
from xlatrain.checkpoint.arrays import describe, read_numpy, read_sharded
from xlatrain.checkpoint.errors import CheckpointMismatchError, CorruptCheckpointError
from xlatrain.checkpoint.manifest import ARRAYS, FILES, ArrayMetadata, read_manifest, sha256
from xlatrain.checkpoint.names import flatten_names
from xlatrain.checkpoint.pending import join_save_to
from xlatrain.checkpoint.record import read_record


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
    """

    def __init__(self, path: epath.Path) -> None:
        self.path = path
        record = read_record(path)
        payload = path / record.payload
        manifest = read_manifest(payload, record.manifest_sha256)
        self.committed_ns = record.committed_ns
        self.files: Mapping[str, bytes] = HostFiles(payload / FILES, manifest.digests)
        self._arrays = payload / ARRAYS
        self._metadata = dict(manifest.arrays)

    def array_metadata(self) -> dict[str, ArrayMetadata]:
        """Name → shape and dtype of every stored array. Names are the saved pytree's keys joined by ``/``."""
        return dict(self._metadata)

    def restore(self, template: Any, *, subset: bool = False, cast: bool = False) -> Any:
        """Read arrays directly onto their shards; local to this process, so every process restores its own shards.

        Args:
            template: a pytree with the structure to return; its leaves (``jax.ShapeDtypeStruct`` with ``sharding``, or
                ``jax.Array``) give shape, dtype and sharding, on any mesh.
            subset: the template may leave stored arrays out.
            cast: convert to the template's dtype where the stored one differs.

        Returns:
            The template's structure with ``jax.Array`` leaves.

        Raises:
            CheckpointMismatchError: lists every name that is missing, unexpected, or has another shape or dtype.
            ValueError: a leaf has no sharding, or needs x64.
            CorruptCheckpointError: the stored data cannot be read.
        """
        named, structure = flatten_names(template)
        for name, leaf in named.items():
            _check_leaf(name, leaf)
        self._check_match(named, subset=subset, cast=cast)
        arrays = read_sharded(self._arrays, self._metadata, named)
        return jax.tree.unflatten(structure, arrays.values())

    def restore_numpy(self, names: list[str] | None = None) -> dict[str, np.ndarray]:
        """Read whole arrays into host memory by name (default: all); typed random keys come as their uint32 bits.

        Raises:
            CheckpointMismatchError: a name is not stored.
        """
        names = list(self._metadata) if names is None else names
        if missing := [name for name in names if name not in self._metadata]:
            raise CheckpointMismatchError(f"{self.path}: no arrays named {_shown(missing)}; {self._stored_names()}")
        return read_numpy(self._arrays, {name: self._metadata[name] for name in names})

    def _check_match(self, named: Mapping[str, Any], *, subset: bool, cast: bool) -> None:
        missing = [name for name in named if name not in self._metadata]
        unexpected = [] if subset else [name for name in self._metadata if name not in named]
        differing = [
            text
            for name, leaf in named.items()
            if name in self._metadata
            for text in _differences(name, describe(name, leaf), self._metadata[name], cast=cast)
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

    If this process has a save to the path in flight, it is waited for.

    Raises:
        CheckpointNotFoundError: nothing there, or nothing that was committed.
        ForeignPathError: a file, or a directory of something else.
        CorruptCheckpointError: lists the files that are missing or truncated.
    """
    target = filesystem.as_path(path)
    join_save_to(target)
    return Checkpoint(target)


def _check_leaf(name: str, leaf: Any) -> None:
    describe(name, leaf)
    if getattr(leaf, "sharding", None) is None:
        raise ValueError(
            f"template[{name!r}] has no sharding: give jax.ShapeDtypeStruct(shape, dtype, sharding=...), or read whole "
            "arrays with restore_numpy()"
        )
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


def _shown(names: list[str]) -> str:
    return ", ".join(names)
