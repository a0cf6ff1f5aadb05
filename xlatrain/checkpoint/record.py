"""The commit record: the one-line pointer ``CURRENT`` that says which payload directory is the checkpoint.

``X.ckpt/CURRENT`` is replaced atomically after everything in the payload is on disk. Whatever the pointer does not name
was never committed, or was replaced: it is no part of the checkpoint, and is removed once its writer is gone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time

from etils import epath

from xlatrain.checkpoint import filesystem, ownership
from xlatrain.checkpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, ForeignPathError
from xlatrain.checkpoint.file_record import FileRecord, is_torch_file, read_file_record

POINTER = "CURRENT"
FORMAT = "xlatrain-checkpoint"
VERSION = 2
_PAYLOAD = re.compile(r"payload-[0-9a-f]{32}\Z")


@dataclasses.dataclass(frozen=True)
class CommitRecord:
    """The contents of the pointer to a payload.

    Attributes:
        payload: name of the payload directory beside the pointer.
        committed_ns: when it was committed, in nanoseconds since the epoch by process 0's clock, but always later than
            the checkpoints that were in the same directory then: "newest" does not depend on a clock that was set back.
        manifest_sha256: digest of the payload's manifest.
    """

    payload: str
    committed_ns: int
    manifest_sha256: str

    def line(self) -> bytes:
        """The pointer's contents, with a digest of its own: a time that was changed would change which is the newest."""
        fields = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self), "sha256": self._digest()}
        return (json.dumps(fields) + "\n").encode()

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()

    def check(self, fields: dict[str, object]) -> None:
        """Compare with the digest among a pointer's fields; the first pointers of this version were written without one.

        Raises:
            ValueError: it is another, or is under another name.
        """
        if "sha256" in fields and fields["sha256"] != self._digest():
            raise ValueError("its digest is another: it was changed since it was written")
        if unknown := fields.keys() - {"format", "version", "sha256", *(field.name for field in dataclasses.fields(self))}:
            raise ValueError(f"unknown fields {sorted(unknown)}")


def read_record(path: epath.Path) -> CommitRecord:
    """The commit record of the checkpoint at a path.

    Raises:
        CheckpointNotFoundError: nothing there, or no save was ever committed there.
        ForeignPathError: a file, or a directory of something else.
        CorruptCheckpointError: the pointer is no commit record of this version.
    """
    pointer = path / POINTER
    try:
        text = filesystem.read_plain(pointer)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_record(path) from None
    except OSError as error:
        raise CorruptCheckpointError(f"{pointer} cannot be read: {error}; restore another checkpoint") from error
    return parse_record(path, text)


def _no_record(path: epath.Path) -> Exception:
    if not path.exists():
        return CheckpointNotFoundError(f"no checkpoint at {path}: the path does not exist")
    if not path.is_dir():
        return ForeignPathError(
            f"{path} is a file, not a checkpoint directory of xlatrain: torch.load reads a .ckpt file, and `xlatrain ckpt "
            f"convert {path} DIRECTORY.ckpt --to directory` makes a directory of it"
        )
    if foreign := foreign_entries(path):
        inside = [name for name in foreign if (path / name / POINTER).exists()]
        hint = f"; checkpoints are in it: give one of {', '.join(inside[:5])}" if inside else ""
        if (path.parent / POINTER).exists():
            hint = f"; the checkpoint is {path.parent}"
        return ForeignPathError(f"{path} has no {POINTER} file: it is not a checkpoint directory of xlatrain{hint}")
    begun = any(path.iterdir())
    return CheckpointNotFoundError(
        f"no checkpoint at {path}: {'a save was begun there, but never committed' if begun else 'the directory is empty'}; "
        f"`xlatrain ckpt ls {path.parent}` lists its neighbours"
    )


def parse_record(path: epath.Path, text: bytes) -> CommitRecord:
    """The commit record in the contents of a pointer; ``path`` is the checkpoint, for errors.

    Raises:
        ForeignPathError: another program wrote it.
        CorruptCheckpointError: it is damaged, or of a later release.
    """
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise ForeignPathError(f"{path / POINTER} says format {fields['format']!r}; expected {FORMAT!r}")
        if fields["version"] != VERSION:
            raise CorruptCheckpointError(
                f"{path / POINTER} says version {fields['version']!r}; this xlatrain reads version {VERSION}; use the release "
                "that wrote it"
            )
        record = CommitRecord(fields["payload"], int(fields["committed_ns"]), fields["manifest_sha256"])
        if not (0 <= record.committed_ns < 1 << 63 and isinstance(record.manifest_sha256, str)):
            raise ValueError("a time or a digest that no save writes")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _no_commit_record(path, text, error) from error
    if not is_payload_name(record.payload):
        raise CorruptCheckpointError(f"{path / POINTER} names the payload {record.payload!r}, which is not a payload of xlatrain")
    try:
        record.check(fields)
    except ValueError as error:
        raise _no_commit_record(path, text, error) from error
    return record


def _no_commit_record(path: epath.Path, text: bytes, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path / POINTER} is not a commit record ({type(error).__name__}: {error}); found {text[:80]!r}; restore the file "
        "from a copy, or restore another checkpoint"
    )


def write_record(path: epath.Path, payload: str, manifest_sha256: str) -> CommitRecord:
    """Commit: point at a complete payload. From here on the checkpoint is the new one."""
    record = CommitRecord(payload, next_stamp(path.parent), manifest_sha256)
    filesystem.replace_atomically(path / POINTER, record.line())
    if not filesystem.is_remote(path):
        filesystem.sync_directory(path.parent)
    return record


def next_stamp(directory: epath.Path | None) -> int:
    """The present time, or just after the newest checkpoint of the directory where a clock puts that in the future."""
    siblings = [record.committed_ns for _, record in (committed_in(directory) if directory is not None else ())]
    return max([time.time_ns(), *(stamp + 1 for stamp in siblings)])


def read_any_record(path: epath.Path | str) -> CommitRecord | FileRecord:
    """The commit record of the checkpoint at a path, of a directory or a file.

    Raises:
        CheckpointNotFoundError, ForeignPathError, CorruptCheckpointError: as :func:`read_record`.
    """
    if isinstance(path, str):
        return read_file_record(path)
    try:
        return read_record(path)
    except (ForeignPathError, CheckpointNotFoundError):
        if path.is_dir() or not path.exists():
            raise
        return read_file_record(path)


def committed_in(directory: epath.Path) -> list[tuple[epath.Path, CommitRecord | FileRecord]]:
    """Every checkpoint directly in a directory, with its record; damaged ones, and other entries, are left out."""
    found = []
    for child in directory.iterdir() if directory.is_dir() else ():
        if child.name.startswith(filesystem.TEMPORARY_PREFIX):  # not in its place yet
            continue
        try:
            found.append((child, read_any_record(child)))
        except (CheckpointNotFoundError, ForeignPathError, CorruptCheckpointError):
            continue
        except OSError:  # a directory that this process may not look into: none of its checkpoints
            continue
    return found


def is_payload_name(name: str) -> bool:
    """True for the name of a payload directory."""
    return isinstance(name, str) and _PAYLOAD.match(name) is not None


def foreign_entries(path: epath.Path) -> list[str]:
    """Names in a directory that no save of ours makes; empty for a checkpoint, and for what a killed save left."""
    ours = (POINTER,)
    return sorted(
        entry.name
        for entry in path.iterdir()
        if not (entry.name in ours or is_payload_name(entry.name) or entry.name.startswith(filesystem.TEMPORARY_PREFIX))
    )


def remove_checkpoint(path: epath.Path | str) -> None:
    """Remove what :func:`xlatrain.checkpoint.remove` documents.

    Raises:
        ForeignPathError: ``path`` is a file that torch did not write, or has files that xlatrain did not save.
    """
    if isinstance(path, str):
        filesystem.remove_object(path)
        return
    if filesystem.is_link(path) or is_torch_file(path):
        path.unlink()
        return
    if not path.exists():
        return
    if not path.is_dir():
        raise ForeignPathError(f"{path} is a file that neither xlatrain nor torch.save wrote; remove it yourself")
    if foreign := foreign_entries(path):
        raise ForeignPathError(f"{path} has files that xlatrain did not save ({', '.join(foreign[:5])}); remove it yourself")
    (path / POINTER).unlink(missing_ok=True)
    filesystem.sync_directory(path)
    if any(ownership.writer_lives(entry.name) and not ownership.is_own(entry.name) for entry in path.iterdir()):
        return  # another run is saving there now: what it commits is its checkpoint, and its next save tidies up
    filesystem.remove_tree(path)
