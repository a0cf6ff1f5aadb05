"""Reading every byte of a checkpoint, and naming what is damaged."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import jax
from etils import epath

from xlatrain.checkpoint import filesystem
from xlatrain.checkpoint.arrays import read_numpy
from xlatrain.checkpoint.digests import as_text, file_digests, value_digest
from xlatrain.checkpoint.errors import CheckpointMismatchError, CorruptCheckpointError
from xlatrain.checkpoint.manifest import ARRAYS, Manifest, read_manifest, wrong_sizes
from xlatrain.checkpoint.pending import join_save_to
from xlatrain.checkpoint.record import foreign_entries, read_record

_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Verification:
    """What a verification found.

    Attributes:
        path: the checkpoint.
        files: relative path of each damaged file → what is wrong with it.
        arrays: name of each array whose values are not those that were saved → what is wrong with it.
        foreign: names of entries beside the payload that no save made: no damage, but not ours.
        bytes_read: size of the stored files.
    """

    path: str
    files: Mapping[str, str]
    arrays: Mapping[str, str]
    foreign: tuple[str, ...]
    bytes_read: int

    @property
    def intact(self) -> bool:
        """Whether everything that was committed is there as it was."""
        return not self.files and not self.arrays

    def raise_if_damaged(self) -> None:
        """Nothing, or an error.

        Raises:
            CorruptCheckpointError: names damaged files and arrays.
        """
        if self.intact:
            return
        arrays = f"; arrays that cannot be trusted: {_listed(self.arrays)}" if self.arrays else ""
        raise CorruptCheckpointError(
            f"{self.path} is damaged: {_listed(self.files)}{arrays}; copy the checkpoint again, or restore another one"
        )


def verify(path: str | os.PathLike[str]) -> Verification:
    """Read every byte of a checkpoint and compare it with what was committed; local to this process.

    Needs the memory of the largest array. A damaged commit record or manifest is raised, because without them nothing can be
    named; everything else is collected.

    Raises:
        CheckpointNotFoundError: nothing there, or nothing that was committed.
        ForeignPathError: a file, or a directory of something else.
        CorruptCheckpointError: commit record, payload directory or manifest are missing or damaged.
    """
    target = filesystem.as_path(path)
    join_save_to(target)
    record = read_record(target)
    payload = target / record.payload
    manifest = read_manifest(payload, record.manifest_sha256, check_sizes=False)
    files = _damaged_files(payload, manifest)
    return Verification(
        os.fspath(target),
        files,
        _changed_arrays(payload, manifest),
        tuple(foreign_entries(target)),
        sum(manifest.sizes.values()),
    )


def _damaged_files(payload: epath.Path, manifest: Manifest) -> dict[str, str]:
    damaged = wrong_sizes(payload, manifest)
    for name, expected in manifest.digests.items():
        if name in damaged:
            continue
        try:
            found = file_digests(payload, [name])[name]
        except OSError as error:
            damaged[name] = f"cannot be read: {error}"
            continue
        if found != expected:
            damaged[name] = "its bytes are not those that were committed"
    return damaged


def _changed_arrays(payload: epath.Path, manifest: Manifest) -> dict[str, str]:
    changed = {}
    for name, entry in manifest.arrays.items():
        if entry.digest is None:
            continue
        try:
            value = read_numpy(payload / ARRAYS, {name: entry})[name]
        except (CorruptCheckpointError, CheckpointMismatchError, jax.errors.JaxRuntimeError, OSError, ValueError) as error:
            changed[name] = f"cannot be read: {_first_line(error)}"
            continue
        if as_text(value_digest(value)) != entry.digest:
            changed[name] = "its values are not those that were saved"
    return changed


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def _listed(damaged: Mapping[str, str]) -> str:
    shown = "; ".join(f"{name}: {what}" for name, what in list(damaged.items())[:_SHOWN])
    return shown + (f" (and {len(damaged) - _SHOWN} more)" if len(damaged) > _SHOWN else "")
