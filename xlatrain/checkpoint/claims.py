"""A run's claim to a directory of checkpoints: two runs that save and prune in one would remove each other's."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

from etils import epath

from xlatrain.checkpoint import filesystem, ownership
from xlatrain.checkpoint.errors import DirectoryInUseError

NAME = ".xlatrain-writer"

BEAT_S = 10.0
"""Between two signs of life in a claim; a run on another host sees by them whether it is held."""

_PATIENCE = 2.5
_held: dict[epath.Path, Claim] = {}


class Claim:
    """A directory that this process writes checkpoints to until :meth:`release`; not collective: process 0 claims.

    Runs of one process share a claim: they come one after the other, or know of each other.

    Args:
        directory: where the checkpoints are; made if it is not there.
        run: what the starts of one run have in common: the next start takes over what the last one held.

    Raises:
        DirectoryInUseError: another run holds it: names its host and process.
        OSError: the directory cannot be written to.
    """

    def __init__(self, directory: str | os.PathLike[str], run: str = "") -> None:
        self._directory = filesystem.as_path(directory)
        self._path = self._directory / NAME
        self._count = 1
        self._released = threading.Event()
        self._facts = {"mark": ownership.mark(), "host": socket.gethostname(), "pid": os.getpid(), "run": run, "beat": 0}
        self._made = _missing(self._directory)
        _wait_until_free(self._path, run)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write()
            if (found := _read(self._path)) is not None and found["mark"] != self._facts["mark"]:
                raise _in_use(self._path, found)  # at the same moment
        except BaseException:
            self._remove_directories()
            raise
        self._thread = threading.Thread(target=self._beat, name="xlatrain-claim", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the directory free for other runs, once the last of this process's runs has released the claim."""
        self._count -= 1
        if self._count != 0:
            return
        _held.pop(self._directory, None)
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if (found := _read(self._path)) is not None and found["mark"] == self._facts["mark"]:
                filesystem.remove_tree(self._path)
        self._remove_directories()

    def __getstate__(self) -> dict[str, Any]:
        return {"_count": 0}  # a copy holds nothing

    def share(self) -> Claim:
        """Count another run of this process as a holder, and return the same claim."""
        self._count += 1
        return self

    def _write(self) -> None:
        filesystem.replace_atomically(self._path, json.dumps(self._facts).encode())

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            self._facts["beat"] += 1
            with contextlib.suppress(OSError):  # a full disk: others see one sign of life less
                self._write()

    def _remove_directories(self) -> None:
        """Remove the directories that were made for the claim alone, where they are empty."""
        with contextlib.suppress(OSError):
            for path in self._made:
                os.rmdir(path)


def claim(directory: str | os.PathLike[str], run: str = "") -> Claim:
    """Claim the directory, as :class:`Claim` says, or share the claim that this process already has."""
    path = filesystem.as_path(directory)
    held = _held.get(path)
    if held is not None and ownership.is_own(f"-{held._facts['mark']}"):  # not that of the process that this one was forked from
        return held.share()
    _held[path] = made = Claim(directory, run)
    return made


def _wait_until_free(path: epath.Path, run: str) -> None:
    found = _read(path)
    if found is None:
        return
    mark = f"-{found['mark']}"
    lives, deadline = ownership.writer_lives(mark), time.monotonic() + _PATIENCE * BEAT_S
    if lives is None and not (run and found["run"] == run):  # on another host
        while time.monotonic() < deadline:
            time.sleep(BEAT_S / 10)
            if (now := _read(path)) is None:
                return
            if now != found:
                raise _in_use(path, now)
    elif lives and not ownership.is_own(mark):
        raise _in_use(path, found)


def _in_use(path: epath.Path, found: dict[str, Any]) -> DirectoryInUseError:
    return DirectoryInUseError(
        f"{path.parent} is in use: process {found['pid']} on host {found['host']} writes checkpoints there, and two runs in one "
        "directory would replace and remove each other's; give each run a dirpath (or default_root_dir) of its own, or end the "
        "other one"
    )


def _read(path: epath.Path) -> dict[str, Any] | None:
    """None: there is no claim, or none that says whose it is."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    known = {"mark": str, "host": str, "pid": int, "run": str, "beat": int}
    return found if isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in known.items()) else None


def _missing(directory: epath.Path) -> list[epath.Path]:
    """The directories on the way that are not there, the deepest first."""
    missing = []
    while not filesystem.is_remote(directory) and not directory.exists():
        missing.append(directory)
        directory = directory.parent
    return missing
