"""Saves in flight: one at a time, in a background thread; the outcome of each is told to a caller."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  registers its shutdown before ours
import errno
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from etils import epath

from xlatrain.checkpoint import filesystem
from xlatrain.checkpoint.agreement import Rendezvous, interrupts_held
from xlatrain.checkpoint.errors import CheckpointError
from xlatrain.checkpoint.library_output import VERBOSE, is_verbose
from xlatrain.checkpoint.record import remove_checkpoint

_log = logging.getLogger(__name__)
_LONGEST = 500  # characters of what storage says
_SHOWN = 120  # beside the name of an error that the system has a number for


class PendingSave:
    """A save whose arrays are off the devices and being written in the background.

    Attributes:
        path: the checkpoint's directory or file.
    """

    def __init__(self, path: epath.Path | str) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._error_seen = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._committed = False
        self._afterwards: list[Callable[[], None]] = []

    def __getstate__(self) -> tuple[epath.Path | str, bool]:
        return self.path, self._committed  # a copy waits for nothing: the thread that writes is this process's

    def __setstate__(self, state: tuple[epath.Path | str, bool]) -> None:
        self.__init__(state[0])
        self._committed = state[1]

    def done(self) -> bool:
        """True when the save was committed or has failed; :meth:`wait` then returns or raises at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is committed on every process.

        Raises:
            CheckpointError: it could not be saved, here or on another process; what was at the path before is still there.
        """
        if error := self._outcome():
            self._error_seen = True
            raise error from (self._error if is_verbose() else None)

    def then_remove(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at ``path``, which this one replaces, once this one is committed; not if it fails.

        Removing it right away would leave neither if the process were killed now. Process 0 removes; others may call it too.

        Raises:
            ForeignPathError: as :func:`xlatrain.checkpoint.remove`, if this save is committed already; later it is logged.
        """
        target = filesystem.as_file_path(path)
        if target != self.path:
            self.then(lambda: remove_checkpoint(target))

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` on process 0 once this is committed, in the background, in order; :meth:`wait` waits for it.

        If it is committed already ``action`` is called now; if it fails, never. What it raises in the background is logged.
        """
        if jax.process_index() != 0:
            return
        with self._lock:
            if not self._committed:
                self._afterwards.append(action)
                return
        action()

    def join(self) -> None:
        """Wait without raising what went wrong."""
        if self._thread is not None:
            self._thread.join()

    def unseen_error(self) -> CheckpointError | None:
        """The error of the save, if nobody who waited has seen it; waits."""
        return None if self._error_seen else self._outcome()

    def start(self, finish: Callable[[], None], fail: Callable[[str], None]) -> None:
        """Run ``finish`` in the background; ``fail`` is told why it raised."""
        self._thread = threading.Thread(target=self._run, args=(finish, fail), name="xlatrain-checkpoint")
        self._thread.start()

    def _run(self, finish: Callable[[], None], fail: Callable[[str], None]) -> None:
        try:
            finish()
        except BaseException as error:  # in a thread: it is raised where somebody waits
            self._error = error
            fail(f"{type(error).__name__}: {error}")
            return
        with self._lock:
            self._committed = True
        for action in self._afterwards:
            try:
                action()
            except Exception as error:  # it is committed: what follows costs space at most
                _log.warning("%s is committed, but the work after it failed: %s: %s", self.path, type(error).__name__, error)

    def _outcome(self) -> CheckpointError | None:
        self.join()
        if self._error is None:
            return None
        left = "intact" if filesystem.exists(self.path) else "gone with the directory"
        return CheckpointError(
            f"saving {self.path} failed: {_cause(self._error)}; the checkpoint that was there before is {left}, and the run's "
            f"state is intact{'' if is_verbose() else f' ({VERBOSE}=1 shows what libraries said)'}"
        )


_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space, then save again"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files, `ulimit -n`, or close some"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "restore the permission, then save again"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "was the directory removed, or its filesystem unmounted?"),
}


def _cause(error: BaseException) -> str:
    """The message of storage in a line, without the pages of settings that TensorStore adds to it."""
    text = " ".join(re.split(r" \[(?=[a-z_ ]+=)", str(error), maxsplit=1)[0].split())
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := re.search(r"os_error_code='(\d+)'", str(error))):
        number = int(found.group(1))
    if number is None and text.startswith("NOT_FOUND"):
        number = errno.ENOENT
    if number is None:
        return text[:_LONGEST]
    return f"{os.strerror(number)} ({_ADVICE.get(number, 'look at the storage, then save again')}): {text[:_SHOWN]}"


_last: PendingSave | None = None
_last_rendezvous: Rendezvous | None = None
_lock = threading.Lock()


def start_in_order(begin: Callable[[Rendezvous, CheckpointError | None], PendingSave]) -> PendingSave:
    """Start a save when the one before it is committed. ``begin`` gets the error of that one, if nobody has seen it, to raise.

    Ctrl-C waits until it has begun: other processes begin it too. A second one does not wait.
    """
    global _last, _last_rendezvous
    with _lock, interrupts_held():
        earlier = finish_last()
        rendezvous = Rendezvous()
        pending = begin(rendezvous, earlier)
        if _last_rendezvous is not None:
            _last_rendezvous.close()
        _last_rendezvous, _last = rendezvous, pending
    return pending


def finish_last() -> CheckpointError | None:
    """Wait for the save that was started last; gives its error if nobody has seen it, once."""
    global _last
    previous, _last = _last, None
    return None if previous is None else previous.unseen_error()


def wait_for_saves() -> None:
    """Return when every save of this process is committed, e.g. at the end of training.

    Raises:
        CheckpointError: the last one failed, and nobody has waited for it.
    """
    if error := finish_last():
        raise error


def join_save_to(path: epath.Path | str) -> None:
    """Wait for a save to ``path`` that is in flight in this process: reading or removing the path means the new checkpoint."""
    if _last is not None and _last.path == path:
        _last.join()


def wait_for_save(path: str | os.PathLike[str]) -> None:
    """Wait for a save of this process to the path that is in flight, so that what is read there is the new checkpoint."""
    join_save_to(filesystem.as_file_path(path))


def _finish_at_exit() -> None:
    """A script that ends without waiting still commits, and learns of an error."""
    if _last is not None and sys.version_info >= (3, 12):  # an interpreter that ends starts no threads any more
        ThreadPoolExecutor.submit = _run_now  # pyright: ignore[reportAttributeAccessIssue]
    if error := finish_last():
        _log.error("%s", error)


def _run_now(_: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    """Run the function in the calling thread, in place of ``ThreadPoolExecutor.submit``."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **kwargs))
    except BaseException as error:
        future.set_exception(error)
    return future


# Plain atexit is too late: before it runs, the thread pools that Orbax writes with refuse new work. concurrent.futures
# registers its own shutdown here too; callbacks run last registered first, which is why its module is imported above.
threading._register_atexit(_finish_at_exit)  # pyright: ignore[reportAttributeAccessIssue]
