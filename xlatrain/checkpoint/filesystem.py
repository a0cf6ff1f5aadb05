"""The few file operations that a commit rests on, for local paths and for object stores (``gs://…``, through etils)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import fsspec
from etils import epath

from xlatrain.checkpoint import ownership

TEMPORARY_PREFIX = ".tmp-"

_STORES = ("gs://", "s3://")  # schemes that both etils and TensorStore know
_SHOWN = 60  # characters of a name in that of a temporary file: names have 255 bytes
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


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


def as_file_path(path: str | os.PathLike[str]) -> epath.Path | str:
    """:func:`as_path` for a checkpoint that is a file; a URL stays as it is where only fsspec knows its scheme."""
    return as_path(path) if holds_checkpoints(path) else os.fspath(path)


def exists(path: epath.Path | str) -> bool:
    """Whether anything is there."""
    if not isinstance(path, str):
        return path.exists()
    files, inner = fsspec.core.url_to_fs(path)
    return files.exists(inner)


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
    """Write a file as :func:`replacing` does."""
    if is_remote(path):
        path.write_bytes(data)
        return
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: epath.Path | str) -> Iterator[BinaryIO]:
    """A file to write, which takes the path at the end of the block, and not if the block raises.

    A reader, or a kill at any moment, finds what was there or what is new, never a part. Locally: a temporary file beside it,
    fsync, rename, fsync of the directory. Elsewhere: what fsspec calls a transaction; object stores write a file as a whole.
    """
    if is_remote(path):
        files, inner = fsspec.core.url_to_fs(os.fspath(path))
        files.makedirs(os.path.dirname(inner), exist_ok=True)
        with files.transaction, files.open(inner, "wb") as file:
            yield file  # pyright: ignore[reportReturnType]
        return
    target = epath.Path(path)
    temporary = beside(target)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put_in_place(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)


def beside(path: epath.Path) -> epath.Path:
    """A path in the same directory that nobody else has, for what is to take the place of ``path``."""
    return path.parent / f"{TEMPORARY_PREFIX}{path.name[:_SHOWN]}-{ownership.mark()}"


def is_temporary(name: str) -> bool:
    """Whether :func:`beside` gave the name."""
    return name.startswith(TEMPORARY_PREFIX) and ownership.is_marked(name)


def put_in_place(new: epath.Path, path: epath.Path) -> None:
    """Rename a file or directory that is complete onto a path, and remove what was there; at no time is nothing there.

    A file and a directory cannot be renamed onto each other: their names are exchanged. Where the filesystem cannot do that at
    once (NFS), a kill between two renames leaves both under other names.
    """
    try:
        os.replace(new, path)
    except (IsADirectoryError, NotADirectoryError, FileExistsError):
        if not _exchanged(new, path):
            aside = beside(path)
            os.rename(path, aside)
            os.rename(new, path)
            new = aside
        remove_tree(new)


def _exchanged(one: epath.Path, other: epath.Path) -> bool:
    """Whether the system could exchange the two names. https://man7.org/linux/man-pages/man2/rename.2.html"""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


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
        raise OSError(f"{path} is not an ordinary file")
    return path.read_bytes()


@contextlib.contextmanager
def open_plain(path: epath.Path | str) -> Iterator[BinaryIO]:
    """An ordinary file to read, also behind a symbolic link; no pipe, which is waited for without end, and no device.

    Raises:
        OSError: it is not there, or no ordinary file, or cannot be read.
    """
    if is_remote(path):
        with fsspec.open(os.fspath(path), "rb") as file:
            yield file  # pyright: ignore[reportReturnType]
        return
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{os.fspath(path)} is not an ordinary file")
    with open(path, "rb") as file:
        yield file


def plain_size(root: epath.Path, name: str) -> int:
    """Bytes of an ordinary file in a directory.

    Raises:
        OSError: it is not there, is not an ordinary file, or a symbolic link leads out of the directory.
    """
    path = root / name
    if is_remote(path):
        return path.stat().length
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is not an ordinary file")
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


def remove_object(url: str) -> None:
    """Remove a file of storage that only fsspec knows; a missing one is no error."""
    files, inner = fsspec.core.url_to_fs(url)
    if files.exists(inner):
        files.rm_file(inner)


def local(path: epath.Path) -> Path | epath.Path:
    """A plain ``pathlib.Path`` where the path is local, for callers that show or compare it."""
    return path if is_remote(path) else Path(os.fspath(path))
