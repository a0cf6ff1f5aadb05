"""The commit record of a checkpoint that is one file: at the end of the zip archive that ``torch.save`` wrote, as its comment.

Whoever reads such archives passes over the comment, so that the file stays what torch wrote. The comment says when the file was
committed and what it was saved with, and has the SHA-256 of every byte before it, and one of itself.

Format of archives: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.16
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

from etils import epath

from xlatrain.checkpoint import filesystem
from xlatrain.checkpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, ForeignPathError

FORMAT = "xlatrain-checkpoint-file"
VERSION = 1
_MARK = b"XLATRAIN"
_FOOTER = len(_MARK) + 4  # the mark, and the length of the record before it
_LONGEST = 0xFFFF  # of a comment
_END = b"PK\x05\x06"
_END_SIZE = 22
_CHUNK = 1 << 20
NEXT_STEP = "copy the checkpoint again, or restore another one"


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """A checkpoint file's record of itself.

    Attributes:
        committed_ns: as of :class:`~xlatrain.checkpoint.record.CommitRecord`.
        body_bytes: how many there are before the comment.
        body_sha256: their digest.
        facts: what the save was told about it.
        versions: the releases that wrote it.
    """

    committed_ns: int
    body_bytes: int
    body_sha256: str
    facts: Mapping[str, Any]
    versions: Mapping[str, str]

    def comment(self) -> bytes:
        """The archive's comment.

        Raises:
            ValueError: the facts are too long for one.
        """
        fields = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self), "sha256": self._digest()}
        text = json.dumps(fields).encode()
        if len(text) + _FOOTER > _LONGEST:
            raise ValueError(f"facts of a checkpoint file are at most {_LONGEST} bytes of JSON, the commit record included")
        return text + len(text).to_bytes(4, "little") + _MARK

    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()


class BodyWriter:
    """The file that ``torch.save`` writes to: passes on what it gets, sums it, and keeps the end back for the comment.

    Args:
        file: opened for writing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._held = b""
        self._written = 0

    def write(self, data: Any) -> int:
        """Take the next bytes, all of them."""
        view = memoryview(data).cast("B")
        if len(view) < _END_SIZE:
            held = self._held + bytes(view)
            self._pass_on(held[:-_END_SIZE])
            self._held = held[-_END_SIZE:]
        else:
            self._pass_on(self._held)
            self._pass_on(view[:-_END_SIZE])
            self._held = bytes(view[-_END_SIZE:])
        return len(view)

    def flush(self) -> None:
        """Nothing: the end is written by :meth:`finish`."""

    def finish(self, committed_ns: int, facts: Mapping[str, Any], versions: Mapping[str, str]) -> FileRecord:
        """Write the end of the archive and the record as its comment.

        Raises:
            ValueError: what was written is no zip archive.
        """
        if len(self._held) != _END_SIZE or not self._held.startswith(_END) or self._held[-2:] != b"\0\0":
            raise ValueError("a checkpoint file must be a zip archive without comment, as torch.save writes it")
        # Numbers are of the same length for any digest, so that the comment's length is known before the digest is.
        unknown = FileRecord(committed_ns, self._written + _END_SIZE, "0" * 64, facts, versions)
        self._pass_on(self._held[:-2] + len(unknown.comment()).to_bytes(2, "little"))
        record = dataclasses.replace(unknown, body_sha256=self._digest.hexdigest())
        self._file.write(record.comment())
        return record

    def _pass_on(self, data: bytes | memoryview) -> None:
        if len(data):
            self._file.write(data)
            self._digest.update(data)
            self._written += len(data)


def read_file_record(path: epath.Path | str) -> FileRecord:
    """The commit record of the checkpoint file at a path. Cheap: reads the end of the file.

    Raises:
        CheckpointNotFoundError: nothing there.
        ForeignPathError: no file, or one that another program wrote.
        CorruptCheckpointError: the record is damaged, or of a later release.
    """
    try:
        with filesystem.open_plain(path) as file:
            return record_at_end(path, file)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"no checkpoint at {path}: the path does not exist") from None
    except OSError as error:
        raise ForeignPathError(f"{path} is not a checkpoint file: {error}") from error


def check_body(path: str | os.PathLike[str], file: BinaryIO) -> FileRecord | None:
    """Compare an open checkpoint file with its record, every byte; None, and nothing compared, where it has none.

    Raises:
        CorruptCheckpointError: it is not what was committed.
    """
    try:
        record = record_at_end(path, file)
    except ForeignPathError:
        return None
    file.seek(0)
    digest, left = hashlib.sha256(), record.body_bytes
    while left:
        data = file.read(min(_CHUNK, left))
        digest.update(data)
        left -= len(data)
        if not data:
            break
    if digest.hexdigest() != record.body_sha256:
        raise CorruptCheckpointError(f"{os.fspath(path)} does not have the contents that were committed; {NEXT_STEP}")
    return record


def is_torch_file(path: epath.Path) -> bool:
    """Whether the path is a file that ``torch.save`` began, ours or another program's."""
    try:
        with filesystem.open_plain(path) as file:
            head = file.read(256)
    except OSError:
        return False
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return head.startswith(b"PK\x03\x04") and name.endswith(b"/data.pkl")


def record_at_end(path: str | os.PathLike[str], file: BinaryIO) -> FileRecord:
    """The commit record at the end of an open file.

    Raises:
        ForeignPathError, CorruptCheckpointError: as :func:`read_file_record`.
    """
    try:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _LONGEST, 0))
        tail = file.read(_LONGEST)
    except (ValueError, NotImplementedError) as error:  # a server that gives files from the beginning only
        raise ForeignPathError(f"{os.fspath(path)} cannot be read from its end: {error}") from error
    length = int.from_bytes(tail[-_FOOTER : -len(_MARK)], "little")
    if not tail.endswith(_MARK) or length > len(tail) - _FOOTER:
        end = tail.rfind(_END)
        announced = int.from_bytes(tail[end + _END_SIZE - 2 : end + _END_SIZE], "little")
        # One of the two is damaged, something was appended, or the record was cut off.
        if FORMAT.encode() in tail or (end >= 0 and announced > len(tail) - end - _END_SIZE):
            raise CorruptCheckpointError(f"{os.fspath(path)}: the commit record at its end is damaged; {NEXT_STEP}")
        raise ForeignPathError(f"{os.fspath(path)} is a file that was not saved by xlatrain")
    return _parsed(os.fspath(path), tail[-_FOOTER - length : -_FOOTER], size - length - _FOOTER)


def _parsed(path: str, text: bytes, body_bytes: int) -> FileRecord:
    try:
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise CorruptCheckpointError(
                f"{path} says version {fields['version']!r}; this xlatrain reads version {VERSION}; use the release that wrote it"
            )
        known = {field.name: fields[field.name] for field in dataclasses.fields(FileRecord)}
        record = FileRecord(**known)
        kinds = (int, int, str, dict, dict)
        if not all(isinstance(value, kind) for value, kind in zip(known.values(), kinds, strict=True)):
            raise ValueError("a value of another type")
        if fields["format"] != FORMAT or fields.keys() != {"format", "version", "sha256", *known}:
            raise ValueError("other fields")
        if fields["sha256"] != record._digest() or not 0 <= record.committed_ns < 1 << 63:
            raise ValueError("its digest is another: it was changed since it was written")
        if record.body_bytes != body_bytes:
            raise ValueError(f"it says {record.body_bytes} bytes, found {body_bytes}")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path}: the commit record at its end is damaged ({type(error).__name__}: {error}); {NEXT_STEP}"
        ) from error
    return record
