"""Fresh processes on this machine that call a function as one world: the programmatic form of :mod:`xlatrain.cluster.launch`."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from xlatrain.cluster.launch import SECRET, child_environment, free_port

_GRACE_S = 10.0


class SpawnedProcessError(RuntimeError):
    """A spawned process raised, or ended without a result; its traceback is in the message.

    Attributes:
        process_id: which of them, in the order of their world.
        pid: its process id in the operating system.
        exitcode: its exit status; None if it raised.
    """

    def __init__(self, message: str, process_id: int, pid: int, exitcode: int | None = None) -> None:
        super().__init__(message)
        self.process_id = process_id
        self.pid = pid
        self.exitcode = exitcode


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    processes: int,
    devices_per_process: int = 1,
    environment: Callable[[int], Mapping[str, str]] | None = None,
    grace_s: float = _GRACE_S,
) -> Any:
    """Call ``function(*args, **kwargs)`` in fresh processes that have joined one world, and wait for them.

    Each starts a new interpreter (the script needs ``if __name__ == "__main__":``), joins the others and computes on
    ``devices_per_process`` CPU devices, unless the environment sets ``JAX_PLATFORMS``. None outlives this call, or this process.

    Args:
        function: picklable, and importable in a fresh process.
        args: picklable.
        kwargs: picklable.
        processes: how many.
        devices_per_process: CPU devices of each.
        environment: of a process's index, more environment variables for it.
        grace_s: seconds between asking a process to end and killing it.

    Returns:
        What process 0's function returned.

    Raises:
        ValueError: fewer than one process.
        SpawnedProcessError: a process raised (with its traceback), or died.
        pickle.PicklingError, TypeError, AttributeError: the function or an argument cannot be sent.
        KeyboardInterrupt: after all processes have ended.
    """
    if processes < 1:
        raise ValueError(f"processes must be at least 1, not {processes}")
    payload = pickle.dumps((function, tuple(args), dict(kwargs or {})))
    port, base = free_port(), {SECRET: secrets.token_hex(16), **os.environ}
    children: list[_Child] = []
    try:
        for index in range(processes):
            own = child_environment(base, index, processes, devices_per_process, port)
            own.update(environment(index) if environment is not None else {})
            children.append(_Child(index, payload, own))
        return _results(children)
    except KeyboardInterrupt:
        _end(children, signal.SIGINT, grace_s)
        raise
    finally:
        _end(children, signal.SIGTERM, grace_s)


def _results(children: Sequence[_Child]) -> Any:
    """Wait until every child has reported; the first failure ends the waiting."""
    result: Any = None
    waiting = {child.reports: child for child in children}
    while waiting:
        for ready in multiprocessing.connection.wait(list(waiting)):
            child = waiting.pop(ready)  # pyright: ignore[reportArgumentType]
            value = child.report()
            if child.index == 0:
                result = value
    for child in children:
        child.process.join()
    return result


def _end(children: Sequence[_Child], number: int, grace_s: float) -> None:
    """Ask what still runs to end; kill it when the time is over."""
    running = [child for child in children if child.process.is_alive()]
    for child in running:
        child.signal(number)
    deadline = time.monotonic() + grace_s
    for child in running:
        child.process.join(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.signal(signal.SIGKILL)  # the child, and processes that are left of its group
        child.process.join()
        child.reports.close()
        child.life.close()


class _Child:
    """A process, the pipe on which it reports, and the pipe whose end tells it that this process is gone."""

    def __init__(self, index: int, payload: bytes, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.index = index
        self.reports, reporter = context.Pipe(duplex=False)
        lifeline, self.life = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(payload, index, reporter, lifeline), name=f"xlatrain-spawn-{index}")
        with _as_environment(environment):
            self.process.start()
        reporter.close()
        lifeline.close()

    def report(self) -> Any:
        """The return value of the process's function.

        Raises:
            SpawnedProcessError: it raised, or died.
        """
        pid = self.process.pid or -1
        try:
            kind, value = self.reports.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with status {code}"
            raise SpawnedProcessError(
                f"process {self.index} {how} before it had a result. If its output says that a process was started before the "
                'bootstrapping phase was over, put the script\'s own calls under `if __name__ == "__main__":`',
                self.index,
                pid,
                code,
            ) from None
        if kind == "error":
            raise SpawnedProcessError(
                f"\n\n-- Process {self.index} terminated with the following error:\n{value}", self.index, pid
            )
        return pickle.loads(value)

    def signal(self, number: int) -> None:
        """Send a signal to the process and to those that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.pid is not None:
                os.killpg(self.process.pid, number)


def _run(payload: bytes, index: int, reporter: Any, lifeline: Any) -> None:
    """Run the function in a spawned process: join the world, call it, report the result or the error."""
    os.setsid()  # Ctrl-C reaches the parent, which passes it on; the group is ended as a whole
    threading.Thread(target=_end_with_parent, args=(lifeline,), name="xlatrain-lifeline", daemon=True).start()
    from xlatrain.cluster import distributed

    try:
        distributed.initialize()
        function, args, kwargs = pickle.loads(payload)
        value = function(*args, **kwargs)
        report = ("value", pickle.dumps(value if index == 0 else None))
    except BaseException as error:  # whatever ends the child, the parent is to say it
        report = ("error", traceback.format_exc())
        reporter.send(report)
        reporter.close()
        distributed.leave(1 if not isinstance(error, KeyboardInterrupt) else -signal.SIGINT)
    sys.stdout.flush()
    reporter.send(report)
    reporter.close()


def _end_with_parent(lifeline: Any) -> None:
    """Wait until the parent's end of the pipe is closed: it has ended us, or it is gone."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def _as_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """``os.environ`` is ``environment``: a spawned interpreter inherits it."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
