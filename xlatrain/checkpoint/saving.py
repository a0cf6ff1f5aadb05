"""Saving: shards of every process and process 0's host state, committed as one by a pointer that is replaced last."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib import metadata
from typing import Any

import jax
from etils import epath

from xlatrain.checkpoint import filesystem, ownership
from xlatrain.checkpoint.agreement import Rendezvous
from xlatrain.checkpoint.arrays import ArrayWriter, check_storable, flatten_names
from xlatrain.checkpoint.errors import CheckpointError, CorruptCheckpointError, ForeignPathError
from xlatrain.checkpoint.file_record import is_torch_file, read_file_record
from xlatrain.checkpoint.manifest import ARRAYS, FILES, ArrayMetadata, sha256, take_digests, write_digests, write_manifest
from xlatrain.checkpoint.pending import PendingSave, start_in_order
from xlatrain.checkpoint.record import POINTER, foreign_entries, is_payload_name, read_record, write_record

FilesArgument = Mapping[str, bytes] | Callable[[], Mapping[str, bytes]] | None
"""Host state for :func:`save`: name → contents, or a function of no arguments that gives that."""

_log = logging.getLogger(__name__)


def save(
    path: str | os.PathLike[str],
    arrays: Any,
    files: FilesArgument = None,
    *,
    facts: Mapping[str, Any] | None = None,
    wait: bool = False,
) -> PendingSave:
    """Save a checkpoint to the directory ``path``; collective: every process calls it, with the same arrays, in the same order.

    ::

        arrays = {"weight": jax.numpy.ones((8, 4))}
        save("first.ckpt", arrays, facts={"step": 100}, wait=True)

    Returns when the arrays are copied off the devices: the caller may donate or change them at once. Saves are committed in
    order, one at a time: a second save waits for the first to commit before it copies.

    Ctrl-C waits until the arrays are copied, so that the other processes, which copy theirs, are not left; a second one does not.

    What was committed at ``path`` before, a directory or a file of :func:`save_file`, stays the checkpoint until the new one is
    complete on disk, and is removed afterwards.
    What killed saves left there is removed too, but nothing that another process is writing there: of several that save to one
    path, the last to commit is the checkpoint.

    Args:
        path: the checkpoint directory, conventionally ``….ckpt``; on a filesystem that every process sees. A relative path is
            taken from the working directory now. Process 0's value counts.
        arrays: a pytree of global ``jax.Array`` s of any dtype, typed random keys included; of numpy arrays process 0's are
            saved.
        files: host state, name → contents, or a function that gives it. Taken from process 0: on others it may be None, and a
            function is not called. It is called before this returns; what it raises is raised on every process.
        facts: what ``xlatrain ckpt ls`` and :func:`prune` know about it, e.g. ``{"step": 100, "metrics": {"loss": 0.5}}``: values
            that JSON has; process 0's count.
        wait: return only when committed.

    Raises:
        ForeignPathError: ``path`` is a file, a link, or a directory of something else.
        TypeError, ValueError: a leaf is no array, is deleted, lives on one process only, or differs from process 0's; ``facts``
            that JSON has not.
        CheckpointError: the previous save failed and nobody has waited for it; or, with ``wait``, this one failed.
    """
    pending = start_in_order(lambda rendezvous, earlier: _begin(path, arrays, files, facts, rendezvous, earlier))
    if wait:
        pending.wait()
    return pending


class _Save:
    """A save, between the copy off the devices and the commit."""

    def __init__(
        self,
        path: epath.Path,
        directory: epath.Path,
        payload: epath.Path,
        files: Mapping[str, bytes],
        facts: Mapping[str, Any],
        rendezvous: Rendezvous,
    ) -> None:
        self.path = path
        self.directory = directory  # not ``path`` while a file is there
        self.payload = payload
        self.files = {name: bytes(data) for name, data in files.items()}
        self.facts = facts
        self.rendezvous = rendezvous
        self._writer: Future[ArrayWriter] = Future()

    def copy(self, named: Mapping[str, Any]) -> PendingSave:
        """Copy the arrays off the devices; what then writes and commits them is a thread."""
        pending = PendingSave(self.path)
        # Before the copy: when that returns, the threads that compress have every processor, and a new one starts late.
        pending.start(self._finish, self.rendezvous.fail)
        try:
            self._writer.set_result(ArrayWriter(self.payload / ARRAYS, named, self.rendezvous))
        except BaseException as error:
            self._writer.set_exception(error)
            pending.join()
            raise
        return pending

    def _finish(self) -> None:
        """Wait for the arrays, then commit on process 0; returns on every process after the commit."""
        writer = self._writer.result()
        writer.wait()
        self.rendezvous.meet()
        if jax.process_count() > 1 and not filesystem.is_remote(self.payload):  # each reads again what it wrote itself
            write_digests(self.payload, jax.process_index())
            self.rendezvous.meet()
        if jax.process_index() == 0:
            self._commit(writer.metadata)
        self.rendezvous.meet()

    def _commit(self, arrays: Mapping[str, ArrayMetadata]) -> None:
        self._write_files()
        versions = {name: metadata.version(name) for name in ("jax", "orbax-checkpoint")}
        digest = write_manifest(self.payload, arrays, self.files, versions, self.facts, take_digests(self.payload))
        replaced = _committed_payload(self.directory)
        write_record(self.directory, self.payload.name, digest)
        if self.directory != self.path:
            filesystem.put_in_place(self.directory, self.path)
            filesystem.sync_directory(self.path.parent)
        try:
            if filesystem.is_remote(self.path) and is_torch_file(self.path):
                self.path.unlink()  # an object of the directory's name
            remove_leftovers(self.path, replaced)
        except OSError as error:  # the checkpoint is committed: what could not be removed costs only space
            _log.warning("%s: could not remove the payload that the committed checkpoint replaced: %s", self.path, error)

    def _write_files(self) -> None:
        if not self.files:
            return
        directory = self.payload / FILES
        directory.mkdir()
        for name, data in self.files.items():
            filesystem.write_durably(directory / name, data)
        filesystem.sync_directory(directory)


def _begin(
    path: str | os.PathLike[str],
    arrays: Any,
    files: FilesArgument,
    facts: Mapping[str, Any] | None,
    rendezvous: Rendezvous,
    earlier: Exception | None,
) -> PendingSave:
    """Agree on what to write and where, and copy the arrays off the devices; ``earlier`` is an error to raise instead."""
    named, failure = ({}, earlier) if earlier else _named(arrays)
    started, expected = _planned(path, named, failure, files, facts, rendezvous)
    try:
        if failure is not None:
            raise failure
        if not started.payload.is_dir():
            raise CheckpointError(
                f"process {jax.process_index()} does not see {started.payload}, which process 0 made; every process must see the "
                "same filesystem: save to a shared one"
            )
        if _digest(named) != expected:  # Orbax would write a mixture
            raise ValueError(
                f"the arrays on process {jax.process_index()} differ from those on process 0 in name, shape, dtype or order; "
                f"every process must save the same; here are {len(named)}: {', '.join(list(named)[:10])}"
            )
        rendezvous.meet()
        return started.copy(named)
    except BaseException as error:  # whatever it is, the other processes must not wait for this one
        rendezvous.fail(f"{type(error).__name__}: {error}")
        if jax.process_index() == 0:
            filesystem.remove_tree(started.payload if started.directory == started.path else started.directory)
        raise


def _named(arrays: Any) -> tuple[dict[str, Any], Exception | None]:
    """The arrays by name, or why they cannot be saved, to be raised when the other processes know of it."""
    try:
        named, _ = flatten_names(arrays)
        check_storable(named)
    except Exception as error:  # whatever it is, the other processes must hear of it before it is raised
        return {}, error
    return named, None


def _digest(named: Mapping[str, Any]) -> str:
    return sha256(repr([(name, tuple(value.shape), str(value.dtype)) for name, value in named.items()]).encode())


def _planned(
    path: str | os.PathLike[str],
    named: Mapping[str, Any],
    failure: Exception | None,
    files: FilesArgument,
    facts: Mapping[str, Any] | None,
    rendezvous: Rendezvous,
) -> tuple[_Save, str]:
    """Process 0 makes the payload directory, or says why not, which is raised on every process; also its arrays' digest."""
    plan, contents, known = {}, {}, {}
    if jax.process_index() == 0:
        try:
            if failure is not None:
                raise failure
            contents = dict(files() if callable(files) else files or {})
            _check_files(contents)
            known = plain_facts(facts)
            plan = {**_make_payload(path), "arrays": _digest(named)}
        except BaseException as error:  # the caller's ``files()`` may raise anything, and the other processes wait
            rendezvous.tell(json.dumps({"error": type(error).__name__, "message": str(error) or type(error).__name__}))
            raise
    plan = json.loads(rendezvous.tell(json.dumps(plan)))
    if "error" in plan:
        raise _PLAN_ERRORS.get(plan["error"], CheckpointError)(f"process 0: {plan['message']}")
    directory = epath.Path(plan["directory"])
    save = _Save(epath.Path(plan["path"]), directory, directory / plan["payload"], contents, known, rendezvous)
    return save, plan["arrays"]


_PLAN_ERRORS = {error.__name__: error for error in (ForeignPathError, CorruptCheckpointError, TypeError, ValueError)}


def _make_payload(path: str | os.PathLike[str]) -> dict[str, str]:
    target = filesystem.as_path(path)
    try:
        _check_target(target)
        remove_leftovers(target)
        instead_of_file = not filesystem.is_remote(target) and target.is_file()
        directory = filesystem.beside(target) if instead_of_file else target
        payload = directory / f"payload-{ownership.mark()}"
        filesystem.make_visible(payload)
    except ForeignPathError:
        raise
    except OSError as error:
        raise cannot_save(target, error) from error
    return {"path": os.fspath(target), "directory": os.fspath(directory), "payload": payload.name}


def cannot_save(target: epath.Path, error: OSError) -> CheckpointError:
    """The error of a save that could not begin."""
    return CheckpointError(
        f"cannot save to {target}: {error.strerror or error} ({type(error).__name__}); is the directory there, and may "
        "this process write to it? The last checkpoint and the run's state are intact"
    )


def _check_files(files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ValueError(f"files[{name!r}]: expected a plain file name, without directories")
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"files[{name!r}] is {type(data).__name__}; expected bytes")


def plain_facts(facts: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(facts or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(f"facts={facts!r}: expected numbers, strings, lists and dicts, as JSON has them ({error})") from error


def _check_target(path: epath.Path) -> None:
    advice = "save to another path, or remove it first"
    if filesystem.is_link(path):
        raise ForeignPathError(
            f"{path} is a symbolic link; saving through it would overwrite the checkpoint it points to; remove the link first"
        )
    if not path.exists():
        return
    if not path.is_dir():
        try:
            read_file_record(path)
        except ForeignPathError:
            raise ForeignPathError(f"{path} is a file and was not saved by xlatrain; {advice}") from None
        except CorruptCheckpointError:  # ours, and no longer a checkpoint
            pass
        return
    if foreign := foreign_entries(path):
        shown = ", ".join(foreign[:5]) + (", …" if len(foreign) > 5 else "")
        raise ForeignPathError(f"{path} is a directory with files that xlatrain did not save ({shown}); {advice}")


def remove_leftovers(path: epath.Path, replaced: str | None = None) -> None:
    """Remove from a checkpoint directory the payload that was ``replaced``, and what dead writers left.

    Only process 0 calls it, while no save of this process is in flight there; other runs may be saving.
    """
    for entry in list(path.iterdir()) if path.is_dir() else ():
        if not (entry.name.startswith(filesystem.TEMPORARY_PREFIX) or is_payload_name(entry.name)):
            continue
        if (entry.name == replaced or ownership.is_abandoned(entry)) and entry.name != _committed_payload(path):
            filesystem.remove_tree(entry)


def _committed_payload(path: epath.Path) -> str | None:
    return read_record(path).payload if (path / POINTER).exists() else None
