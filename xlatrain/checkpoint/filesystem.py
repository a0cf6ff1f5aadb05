"""The few file operations that a commit rests on, for local paths and for object stores (``gs://…``, through etils)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from xlatrain.checkpoint import ownership

TEMPORARY_PREFIX = ".tmp-"

_STORES = ("gs://", "s3://")  # schemes that both etils and TensorStore know


def as_path(path: str | os.PathLike[str]) -> epath.Path:
    """An absolute path, so that a later ``os.chdir`` does not move a save in flight.

    Raises:
        ValueError: it is empty, or a URL that arrays cannot be written to.
    """
    if isinstance(path, str) and not path:
        raise ValueError("path is empty; give the checkpoint's directory, e.g. 'checkpoints/last.ckpt'")
    text = os.fspath(path).removeprefix("file://")
    if not holds_checkpoints(text):
        raise ValueError(
            f"{text}: checkpoints are written to directories, {' and '.join(_STORES)}; for other storage mount it, or let "
            "xlatrain.checkpoint.DurableCopies (TieredCheckpoint(durable_dirpath=…)) copy them there"
        )
    return epath.Path(text if is_remote(text) else os.path.abspath(os.path.expanduser(text)))


def holds_checkpoints(path: str | os.PathLike[str]) -> bool:
    """False for a URL that arrays cannot be written to; a stock ``.ckpt`` file may be there."""
    text = os.fspath(path).removeprefix("file://")
    return not is_remote(text) or text.startswith(_STORES)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """True for a URL such as ``gs://bucket/run``."""
    return "://" in os.fspath(path)


def is_link(path: epath.Path) -> bool:
    """True for a symbolic link (object stores have none)."""
    return not is_remote(path) and os.path.islink(path)


def make_visible(directory: epath.Path) -> None:
    """Make a new directory that other processes see. Object stores have none without an object in them, so that it gets one."""
    directory.mkdir(parents=True)
    if is_remote(directory):
        (directory / ".begun").write_bytes(b"begun")


def write_durably(path: epath.Path, data: bytes) -> None:
    """Write a new file that nobody reads yet, and wait until it is on the disk (``fsync``)."""
    if is_remote(path):
        path.write_bytes(data)
        return
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_atomically(path: epath.Path, data: bytes) -> None:
    """Write a file such that a reader, or a kill at any moment, finds the old contents or the new, never a part.

    Locally: a temporary file beside it, fsync, rename, fsync of the directory. Writes to object stores are atomic already.
    """
    if is_remote(path):
        path.write_bytes(data)
        return
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}-{ownership.mark()}"
    write_durably(temporary, data)
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: epath.Path) -> None:
    """Make the names in a directory survive a power cut."""
    if is_remote(path) or os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_plain(path: epath.Path) -> bytes:
    """The contents of an ordinary file: no link, which may lead anywhere, and no pipe, which is waited for without end.

    Raises:
        OSError: it is not there, or no ordinary file, or cannot be read.
    """
    if not is_remote(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(f"{path} is no ordinary file")
    return path.read_bytes()


def plain_size(root: epath.Path, name: str) -> int:
    """Bytes of an ordinary file in a directory.

    Raises:
        OSError: it is not there, is no ordinary file, or a symbolic link leads out of the directory.
    """
    path = root / name
    if is_remote(path):
        return path.stat().length
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no ordinary file")
    if not os.path.realpath(path).startswith(os.path.realpath(root) + os.sep):
        raise OSError("a symbolic link leads out of the checkpoint")
    return found.st_size


def walk_files(root: epath.Path) -> Iterator[tuple[str, int]]:
    """Relative POSIX name and size in bytes of every file below a directory, sorted by name in each directory."""
    for entry in sorted(root.iterdir(), key=lambda child: child.name):
        if entry.is_dir():
            for name, size in walk_files(entry):
                yield f"{entry.name}/{name}", size
        else:
            yield entry.name, entry.stat().length


def remove_tree(path: epath.Path) -> None:
    """Remove a directory or a file; a missing one is no error (another process may clean up too)."""
    try:
        if path.is_dir() and not is_link(path):
            path.rmtree(missing_ok=True)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass


def local(path: epath.Path) -> Path | epath.Path:
    """A plain ``pathlib.Path`` where the path is local, for callers that show or compare it."""
    return path if is_remote(path) else Path(os.fspath(path))
