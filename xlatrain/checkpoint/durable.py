"""Copies of checkpoints on storage that outlives the machine, made in the background.

A run saves to a fast directory and is blocked by nothing else. One thread copies what was committed there, in order, to a durable
directory: any URL that fsspec opens (``gs://…``, ``s3://…``, ``file:///mnt/…``). A copy has the original's layout, payload and
commit record, and is committed as it is, by its pointer, or as a whole file: a kill leaves no half copy that looks whole, and
"newest" means the same in both places.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import posixpath
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
from etils import epath

from xlatrain.checkpoint import filesystem, ownership
from xlatrain.checkpoint.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, ForeignPathError
from xlatrain.checkpoint.file_record import FileRecord, check_body, record_at_end
from xlatrain.checkpoint.manifest import MANIFEST, Manifest, read_manifest, sha256
from xlatrain.checkpoint.record import POINTER, CommitRecord, parse_record, read_any_record
from xlatrain.checkpoint.retention import Entry, Retention, kept

_ATTEMPTS = 3
_CHUNK = 1 << 22
_log = logging.getLogger(__name__)


class DurableCopies:
    """The durable directory of a run. Process 0 makes one; it is not collective, and the original directory is local.

    Args:
        directory: URL, or path; nothing but the copies of one run is in it.
        retention: which copies stay; None: all but those that :meth:`remove` names.

    Raises:
        ValueError: fsspec does not know the protocol.
        ImportError: the package for the protocol is missing (``gcsfs``, ``s3fs``).
    """

    def __init__(self, directory: str | os.PathLike[str], retention: Retention | None = None) -> None:
        self.directory = os.fspath(directory)
        self._files, self._root = fsspec.core.url_to_fs(self.directory)
        self._local = "file" in ((p,) if isinstance(p := self._files.protocol, str) else p)
        self._retention = retention
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []
        self._failed: dict[Path, str] = {}

    def copy(self, path: str | os.PathLike[str]) -> None:
        """Copy a committed checkpoint, in the background; with it what could not be copied before."""
        for one in (*list(self._failed), Path(path)):
            self._submit(lambda one=one: self._try(one))

    def remove(self, name: str) -> None:
        """Remove a copy, behind the copies that are waiting; never the only complete one."""
        self._submit(lambda: self._remove_copy(name))

    def wait(self) -> None:
        """Return when everything that was asked for is done.

        Raises:
            CheckpointError: lists what could not be copied; the originals are where they were.
        """
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.result()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._failed:
            told = "; ".join(f"{path}: {why}" for path, why in self._failed.items())
            raise CheckpointError(f"not copied to {self.directory}: {told}; the originals are intact: copy them yourself")

    def newest(self) -> tuple[str, int] | None:
        """Name of the copy that was committed last, and when, as :func:`xlatrain.checkpoint.commit_time_ns`."""
        records = self.records()
        return max(((name, record.committed_ns) for name, record in records.items()), key=lambda one: one[1], default=None)

    def records(self) -> dict[str, CommitRecord | FileRecord]:
        """Name of every complete copy → its commit record.

        Raises:
            OSError: the storage does not answer.
        """
        self._files.invalidate_cache()
        found = {}
        for entry in self._files.ls(self._root, detail=False) if self._files.isdir(self._root) else ():
            name = posixpath.basename(str(entry).replace("\\", "/").rstrip("/"))
            if name.startswith(filesystem.TEMPORARY_PREFIX):
                continue
            try:
                if self._files.isfile(entry):
                    with self._files.open(entry, "rb") as file:
                        found[name] = record_at_end(name, file)
                else:
                    text = self._files.cat_file(f"{self._root}/{name}/{POINTER}")
                    found[name] = parse_record(epath.Path(name), text)
            except (FileNotFoundError, NotADirectoryError, CorruptCheckpointError, ForeignPathError):
                continue  # no checkpoint; storage that does not answer is an error, or an older one would be the newest
        return found

    def fetch(self, name: str, directory: str | os.PathLike[str]) -> Path:
        """Bring a copy back to ``directory``, whole or not at all; gives its path there.

        Raises:
            CheckpointNotFoundError: there is no such copy.
            CorruptCheckpointError: it lost a file.
        """
        record = self.records().get(name)
        if record is None:
            raise CheckpointNotFoundError(f"{self.directory} has no complete copy of {name}")
        target = filesystem.as_path(Path(directory) / name)
        if isinstance(record, FileRecord):
            self._fetch_file(name, target)
            return Path(os.fspath(target))
        payload, source = target / record.payload, f"{self._root}/{name}/{record.payload}"
        manifest = self._manifest(name, record)
        for file in (*manifest.sizes, MANIFEST):
            (payload / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                self._files.get_file(f"{source}/{file}", os.fspath(payload / file))
            except FileNotFoundError:
                raise CorruptCheckpointError(f"{self.directory}/{name}: {record.payload}/{file} is missing") from None
        read_manifest(payload, record.manifest_sha256)
        filesystem.replace_atomically(target / POINTER, record.line())
        return Path(os.fspath(target))

    def _fetch_file(self, name: str, target: epath.Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filesystem.replacing(target) as copy, self._files.open(f"{self._root}/{name}", "rb") as source:
            shutil.copyfileobj(source, copy, _CHUNK)
        with filesystem.open_plain(target) as file:
            check_body(target, file)

    def _submit(self, action: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "xlatrain-durable")
        self._waiting.append(self._thread.submit(action))

    def _try(self, path: Path) -> None:
        try:
            for _ in range(_ATTEMPTS):
                if self._copied(path):
                    break
            self._failed.pop(path, None)
            if self._retention is not None:
                self._prune(self._retention)
        except Exception as error:  # training goes on; it is tried again with the next one, and told in the end
            self._failed[path] = f"{type(error).__name__}: {error}"
            _log.warning("%s could not be copied to %s, and will be tried again: %s", path, self.directory, error)

    def _copied(self, path: Path) -> bool:
        """Copy it as it is now; False if it was saved again meanwhile."""
        source = filesystem.as_path(path)
        try:
            record = read_any_record(source)
        except CheckpointNotFoundError:  # removed since: a newer one took its place
            return True
        try:
            if isinstance(record, FileRecord):
                self._put_file(source)
            else:
                self._put(source, record)
        except (FileNotFoundError, CorruptCheckpointError):
            if _still(source, record):
                raise
            return False
        return True

    def _put_file(self, source: epath.Path) -> None:
        self._files.makedirs(self._root, exist_ok=True)
        copy = f"{self._root}/{source.name}"
        target = epath.Path(copy) if self._local else self._files.unstrip_protocol(copy)
        with filesystem.open_plain(source) as file, filesystem.replacing(target) as written:
            shutil.copyfileobj(file, written, _CHUNK)

    def _put(self, source: epath.Path, record: CommitRecord) -> None:
        manifest = read_manifest(source / record.payload, record.manifest_sha256)
        target = f"{self._root}/{source.name}"
        for file in (*manifest.sizes, MANIFEST):
            copy = f"{target}/{record.payload}/{file}"
            self._files.makedirs(posixpath.dirname(copy), exist_ok=True)
            self._files.put_file(os.fspath(source / record.payload / file), copy)
            if self._local:
                _to_disk(copy)
        for file, size in manifest.sizes.items():
            if (found := self._files.info(f"{target}/{record.payload}/{file}")["size"]) != size:
                raise OSError(f"{file} has {size} bytes, but its copy {found}")
        replaced = self._committed(target)
        self._point(target, record)
        for entry in self._files.ls(target, detail=False):
            name = posixpath.basename(str(entry).replace("\\", "/").rstrip("/"))
            if name != self._committed(target) and (name == replaced or self._is_abandoned(entry, name)):
                self._files.rm(entry, recursive=True)

    def _is_abandoned(self, entry: str, name: str) -> bool:
        """Whether no run is still copying to the entry, judged as by :func:`xlatrain.checkpoint.ownership.is_abandoned`."""
        if (lives := ownership.writer_lives(name)) is not None:
            return not lives or ownership.is_own(name)
        written = [_written(facts) for facts in self._files.find(entry, detail=True).values()]
        return time.time() - max(written, default=math.inf) >= ownership.LEASE_S

    def _committed(self, target: str) -> str | None:
        try:
            return parse_record(epath.Path(target), self._files.cat_file(f"{target}/{POINTER}")).payload
        except (FileNotFoundError, CorruptCheckpointError):
            return None

    def _point(self, target: str, record: CommitRecord) -> None:
        """Commit the copy."""
        if self._local:
            filesystem.replace_atomically(epath.Path(target) / POINTER, record.line())
        else:  # object stores write a file as a whole
            self._files.pipe_file(f"{target}/{POINTER}", record.line())

    def _facts(self, name: str, record: CommitRecord | FileRecord) -> dict[str, Any]:
        return dict(record.facts if isinstance(record, FileRecord) else self._manifest(name, record).facts)

    def _manifest(self, name: str, record: CommitRecord) -> Manifest:
        text = self._files.cat_file(f"{self._root}/{name}/{record.payload}/{MANIFEST}")
        if sha256(text) != record.manifest_sha256:
            raise CorruptCheckpointError(
                f"{self.directory}/{name}/{record.payload}/{MANIFEST} differs from the one that was committed"
            )
        return Manifest.from_json(text)

    def _prune(self, retention: Retention) -> None:
        entries, records = [], self.records()
        for name, record in records.items():
            try:
                facts = self._facts(name, record)
            except (OSError, CorruptCheckpointError, json.JSONDecodeError):
                continue  # damaged: for its owner to look at
            entries.append(Entry(epath.Path(name), record.committed_ns, facts, None))
        entries.sort(key=lambda entry: entry.committed_ns, reverse=True)
        keep = kept(entries, retention)
        for entry in entries:
            if entry.path not in keep:
                self._delete(entry.path.name)

    def _remove_copy(self, name: str) -> None:
        try:
            if name in (records := self.records()) and len(records) > 1 and not self._failed:
                self._delete(name)
        except OSError as error:  # costs space at most
            _log.warning("%s of %s could not be removed: %s: %s", name, self.directory, type(error).__name__, error)

    def _delete(self, name: str) -> None:
        if not self._files.isfile(f"{self._root}/{name}"):
            self._files.rm(f"{self._root}/{name}/{POINTER}")  # first: what is left of a kill is no checkpoint
        self._files.rm(f"{self._root}/{name}", recursive=True)


def _still(source: epath.Path, record: CommitRecord | FileRecord) -> bool:
    try:
        return read_any_record(source) == record
    except CheckpointNotFoundError:
        return False


def _written(facts: Mapping[str, Any]) -> float:
    """When a file was written, by what its storage calls it; infinity: it does not say."""
    for name in ("mtime", "updated", "LastModified", "last_modified", "created"):
        if isinstance(found := facts.get(name), int | float):
            return float(found)
        if isinstance(found, datetime.datetime):
            return found.timestamp() if found.tzinfo else found.replace(tzinfo=datetime.UTC).timestamp()
    return math.inf


def _to_disk(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
