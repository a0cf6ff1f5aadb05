"""Checkpoints as directory entries: which are there, which is newest, removing one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import jax
from etils import epath

from xlatrain.checkpoint import filesystem, ownership
from xlatrain.checkpoint.agreement import Rendezvous
from xlatrain.checkpoint.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, ForeignPathError
from xlatrain.checkpoint.pending import join_save_to
from xlatrain.checkpoint.record import (
    POINTER,
    committed_in,
    foreign_entries,
    read_any_record,
    read_record,
    remove_checkpoint,
)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """True when a save was committed at the path, as a directory or a file. Cheap: reads the commit record only."""
    return commit_time_ns(path) is not None


def is_checkpoint_directory(path: str | os.PathLike[str]) -> bool:
    """True when a directory was committed at the path. Cheap: reads the commit record only; :func:`open_checkpoint` verifies."""
    if not filesystem.holds_checkpoints(path):
        return False
    try:
        read_record(filesystem.as_path(path))
    except (CheckpointNotFoundError, ForeignPathError, CorruptCheckpointError):
        return False
    return True


def commit_time_ns(path: str | os.PathLike[str]) -> int | None:
    """The time at which the checkpoint at the path was committed, by its commit record; None when there is none. Cheap.

    Nanoseconds since the epoch by process 0's clock, but always later than the checkpoints beside it at that time.
    """
    try:
        return read_any_record(filesystem.as_file_path(path)).committed_ns
    except (CheckpointNotFoundError, ForeignPathError, CorruptCheckpointError):
        return None
    except ImportError:  # fsspec's package for the scheme is missing, which reading will say
        return None


def newest(directory: str | os.PathLike[str]) -> Path | epath.Path | None:
    """The checkpoint directly in a directory that was committed last, by the commit records; None when there is none.

    File times do not count: copying a directory, or a clock that was set back, does not change the answer.
    """
    found = committed_in(filesystem.as_path(directory))
    return filesystem.local(max(found, key=lambda entry: (entry[1].committed_ns, entry[0].name))[0]) if found else None


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, or what a killed save left of one; not collective: process 0 calls it.

    A save of this process to the path is waited for. The pointer goes first: a kill half-way leaves nothing that looks like a
    checkpoint. A symbolic link is removed, not followed. Nothing there is no error.

    Raises:
        ForeignPathError: a file that torch did not write, or a directory with anything in it that xlatrain did not save.
    """
    target = filesystem.as_file_path(path)
    join_save_to(target)
    remove_checkpoint(target)


def check_shared(directory: str | os.PathLike[str]) -> None:
    """Find out before the first step whether every process sees the same directory; collective; makes the directory.

    Raises:
        CheckpointError: on every process: names the processes that do not see what process 0 wrote.
    """
    rendezvous = Rendezvous()
    path = filesystem.as_path(directory)
    token = path / f"{filesystem.TEMPORARY_PREFIX}shared-{rendezvous.tell(uuid.uuid4().hex)}"
    failure = ""
    if jax.process_index() == 0:
        failure = _try_write(token)
    _settle(rendezvous, failure)
    try:
        _settle(rendezvous, "" if token.exists() else _not_shared(path))
    finally:
        if jax.process_index() == 0:
            filesystem.remove_tree(token)


def _settle(rendezvous: Rendezvous, failure: str) -> None:
    if not failure:
        rendezvous.meet()
        return
    rendezvous.fail(failure)
    raise CheckpointError(f"process {jax.process_index()}: {failure}")


def _try_write(token: epath.Path) -> str:
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.write_bytes(b"")
    except OSError as error:
        return f"cannot write to {token.parent}: {error}"
    return ""


def _not_shared(path: epath.Path) -> str:
    return (
        f"does not see what process 0 wrote into {path}: checkpoints need a directory that all processes share; set "
        "default_root_dir (or the checkpoint's path) to one"
    )


def clean(directory: str | os.PathLike[str], *, older_than_s: float = ownership.LEASE_S) -> list[Path | epath.Path]:
    """Remove what killed saves left in a directory and in its checkpoints; not collective: process 0 calls it when a run starts.

    Left-overs are payloads that no commit record names, and temporary files; a checkpoint directory that holds nothing else goes
    too. What was never committed is never a checkpoint, so that nothing restorable is removed.

    Args:
        directory: the directory in which the checkpoints are.
        older_than_s: what another host's process has written to more recently stays: it may be saving there now. Of a process
            of this host it is known.

    Returns:
        What was removed.
    """
    removed = []
    parent = filesystem.as_path(directory)
    for path in parent.iterdir() if parent.is_dir() else ():
        if filesystem.is_temporary(path.name):
            if not ownership.is_own(path.name) and ownership.is_abandoned(path, older_than_s):
                filesystem.remove_tree(path)
                removed.append(filesystem.local(path))
            continue
        if filesystem.is_link(path) or not path.is_dir() or foreign_entries(path):
            continue
        try:
            committed = read_record(path).payload
        except CheckpointNotFoundError:
            committed = None
        except CorruptCheckpointError:
            continue  # one of the payloads may be the checkpoint, and nothing says which
        if committed is None and not any(path.iterdir()):
            continue  # an empty directory may be anybody's
        for entry in list(path.iterdir()):
            if entry.name not in (POINTER, committed) and ownership.is_abandoned(entry, older_than_s):
                filesystem.remove_tree(entry)
                removed.append(filesystem.local(entry))
        if not any(path.iterdir()):
            filesystem.remove_tree(path)
    return removed
