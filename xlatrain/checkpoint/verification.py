"""Reading every byte of a checkpoint, and naming what is damaged."""

from __future__ import annotations

import dataclasses
import os
import posixpath
import zipfile
import zlib
from collections.abc import Mapping
from typing import BinaryIO

from etils import epath

from xlatrain.checkpoint import filesystem
from xlatrain.checkpoint.arrays import LAYOUT, read_numpy, root_cause
from xlatrain.checkpoint.chunk_files import damaged_file
from xlatrain.checkpoint.errors import CorruptCheckpointError
from xlatrain.checkpoint.file_record import check_body, is_torch_file
from xlatrain.checkpoint.manifest import ARRAYS, UNREADABLE, ArrayMetadata, Manifest, file_digest, read_manifest, wrong_sizes
from xlatrain.checkpoint.pending import join_save_to
from xlatrain.checkpoint.record import foreign_entries, read_record

_SHOWN = 10
_LENGTH = 300


@dataclasses.dataclass(frozen=True)
class Verification:
    """The findings of a verification.

    Attributes:
        path: the checkpoint.
        files: relative path of each damaged file → what is wrong with it.
        arrays: name of each array whose values cannot be read, or are not those that were saved → what is wrong with it.
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
        """Raise an error that names the damage, if there is any.

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
    """Read all of a checkpoint, and compare it with the checksums that were stored with it; local to this process.

    Needs the memory of the largest array. A damaged commit record or manifest is raised, because without them nothing can be
    named; everything else is collected.

    Raises:
        CheckpointNotFoundError: nothing there, or nothing that was committed.
        ForeignPathError: a file, or a directory of something else.
        CorruptCheckpointError: commit record, payload directory or manifest are missing or damaged.
    """
    location = filesystem.as_file_path(path)
    join_save_to(location)
    if isinstance(location, str) or is_torch_file(location):
        return _verify_file(location)
    target = location
    record = read_record(target)
    payload = target / record.payload
    manifest = read_manifest(payload, record.manifest_sha256, check_sizes=False)
    files = _damaged_files(payload, manifest)
    arrays = {}
    layout = [f"{ARRAYS}/{name}" for name in LAYOUT if f"{ARRAYS}/{name}" in files]
    layout += [name for name, what in files.items() if what.startswith(UNREADABLE)]  # TensorStore would wait for a pipe
    for name, entry in manifest.arrays.items():
        if layout:
            arrays[name] = f"is not read because of {layout[0]}, which is damaged"
        elif error := _unreadable(payload / ARRAYS, name, entry):
            arrays[name] = f"cannot be read: {error}"[:_LENGTH]
            if file := damaged_file(payload / ARRAYS, error):
                files.setdefault(f"{ARRAYS}/{file}", "its bytes are not those that were committed")
    return Verification(os.fspath(target), files, arrays, tuple(foreign_entries(target)), sum(manifest.sizes.values()))


def _verify_file(path: epath.Path | str) -> Verification:
    """Verify a checkpoint file by its commit record; one that another program wrote by the archive's CRC-32."""
    with filesystem.open_plain(path) as file:
        size = file.seek(0, os.SEEK_END)
        damaged = {}
        try:
            record = check_body(path, file)
        except CorruptCheckpointError as error:
            damaged, record = {posixpath.basename(os.fspath(path)): str(error)}, None
        if damaged or record is None:
            damaged |= _damaged_entries(path, file)
    return Verification(os.fspath(path), damaged, {}, (), size)


def _damaged_entries(path: epath.Path | str, file: BinaryIO) -> dict[str, str]:
    try:
        with zipfile.ZipFile(file) as archive:
            return {} if (name := archive.testzip()) is None else {name: "its bytes are not those of its CRC-32"}
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, EOFError, zlib.error) as error:
        return {posixpath.basename(os.fspath(path)): f"it is no whole zip archive: {error}"}


def _damaged_files(payload: epath.Path, manifest: Manifest) -> dict[str, str]:
    damaged = wrong_sizes(payload, manifest)
    for name, expected in manifest.digests.items():
        if name in damaged:
            continue
        try:
            found = file_digest(payload / name)
        except OSError as error:
            damaged[name] = f"{UNREADABLE}: {error}"
            continue
        if found != expected:
            damaged[name] = "its bytes are not those that were committed"
    return damaged


def _unreadable(directory: epath.Path, name: str, entry: ArrayMetadata) -> str:
    """The reason why an array cannot be read, or is not as saved; empty if all its checksums are right."""
    try:
        read_numpy(directory, {name: entry})
    except CorruptCheckpointError as error:
        return str(root_cause(error))
    return ""


def _listed(damaged: Mapping[str, str]) -> str:
    shown = "; ".join(f"{name}: {what}" for name, what in list(damaged.items())[:_SHOWN])
    return shown + (f" (and {len(damaged) - _SHOWN} more)" if len(damaged) > _SHOWN else "")
