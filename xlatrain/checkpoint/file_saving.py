"""Saving a checkpoint that is one file: process 0 writes it beside its place, and renames it there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import jax
from etils import epath

from xlatrain.checkpoint import filesystem, ownership
from xlatrain.checkpoint.agreement import Rendezvous
from xlatrain.checkpoint.errors import CheckpointError, ForeignPathError
from xlatrain.checkpoint.file_record import BodyWriter, FileRecord
from xlatrain.checkpoint.pending import PendingSave, join_save_to, start_in_order
from xlatrain.checkpoint.record import POINTER, foreign_entries, next_stamp
from xlatrain.checkpoint.saving import cannot_save, plain_facts

Write = Callable[[BodyWriter], None]
"""Writes a zip archive, as ``torch.save`` does, to what it is given."""


def save_file(
    path: str | os.PathLike[str],
    prepare: Callable[[], Write],
    *,
    facts: Mapping[str, Any] | None = None,
    wait: bool = False,
) -> PendingSave:
    """Save a checkpoint to the file ``path``; collective: every process calls it, in the same order.

    Process 0 alone writes, in the background; saves are committed in order, one at a time, as those of
    :func:`xlatrain.checkpoint.save`. What was committed at ``path`` before, a file or a directory, stays until the new file is
    complete.

    Args:
        path: the file, conventionally ``….ckpt``; a path, or a URL that fsspec opens. Missing directories are made.
        prepare: called on process 0 before this returns, gives the function that writes the file, which is called in the
            background: what it needs must not change.
        facts: as of :func:`xlatrain.checkpoint.save`.
        wait: return only when committed.

    Raises:
        ForeignPathError: ``path`` is a directory of something else.
        TypeError, ValueError: ``facts`` that JSON has not, or that are too long. What ``prepare`` raises is raised there, and a
            ``CheckpointError`` on other processes.
        CheckpointError: the save before this failed and nobody has waited for it; or, with ``wait``, this one failed.
    """
    pending = start_in_order(lambda rendezvous, earlier: _begin(path, prepare, facts, rendezvous, earlier))
    if wait:
        pending.wait()
    return pending


def _begin(
    path: str | os.PathLike[str],
    prepare: Callable[[], Write],
    facts: Mapping[str, Any] | None,
    rendezvous: Rendezvous,
    earlier: CheckpointError | None,
) -> PendingSave:
    write, known = None, {}
    try:
        if earlier is not None:
            raise earlier
        target = filesystem.as_file_path(path)
        if jax.process_index() == 0:
            known = plain_facts(facts)
            FileRecord(0, 0, "", known, _versions()).comment()  # too long ones are found now
            _prepare_place(target)
            write = prepare()
    except BaseException as error:  # the caller's function may raise anything, and the other processes wait
        rendezvous.fail(f"{type(error).__name__}: {error}")
        raise
    rendezvous.meet()
    pending = PendingSave(target)
    pending.start(lambda: _finish(target, write, known, rendezvous), rendezvous.fail)
    return pending


def _finish(target: epath.Path | str, write: Write | None, facts: Mapping[str, Any], rendezvous: Rendezvous) -> None:
    """Write and commit on process 0; returns on every process after the commit."""
    if write is not None:
        _write(target, write, facts)
    rendezvous.meet()


def write_file(path: str | os.PathLike[str], write: Write, facts: Mapping[str, Any] | None = None) -> None:
    """Save a checkpoint to the file ``path`` now; not collective: one process calls it. Otherwise as :func:`save_file`."""
    target = filesystem.as_file_path(path)
    join_save_to(target)
    _prepare_place(target)
    _write(target, write, plain_facts(facts))


def _write(target: epath.Path | str, write: Write, facts: Mapping[str, Any]) -> None:
    stamp = next_stamp(None if isinstance(target, str) else target.parent)
    # Where the store has objects below the name of the file: a directory that is replaced, its pointer first.
    below = [] if isinstance(target, str) or not filesystem.is_remote(target) or not target.is_dir() else list(target.iterdir())
    with filesystem.replacing(target) as file:
        body = BodyWriter(file)
        write(body)
        body.finish(stamp, facts, _versions())
    for entry in sorted(below, key=lambda entry: entry.name != POINTER):
        filesystem.remove_tree(entry)


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("jax", "torch")}


def _prepare_place(path: epath.Path | str) -> None:
    """Look whether the file may take the path, make its directory, and remove what killed saves left beside it."""
    if isinstance(path, str):
        return
    if path.is_dir() and not filesystem.is_link(path) and (foreign := foreign_entries(path)):
        raise ForeignPathError(
            f"{path} is a directory with files that xlatrain did not save ({', '.join(foreign[:5])}); save to another path, or "
            "remove it first"
        )
    if filesystem.is_remote(path):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise cannot_save(path, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))) from error
    except OSError as error:
        raise cannot_save(path, error) from error
    start = filesystem.beside(path).name[:-32]  # without the mark
    for left in path.parent.iterdir():
        if left.name.startswith(start) and filesystem.is_temporary(left.name) and ownership.is_abandoned(left):
            filesystem.remove_tree(left)
