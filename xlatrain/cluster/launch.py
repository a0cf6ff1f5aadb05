"""A pod on one machine: several processes of one script, each with its own devices. (Several machines:
:mod:`xlatrain.cluster.hosts`.)

Every process is the leader of its own process group, so that what it has started (data loader workers, compilers) ends with it.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

COORDINATOR = "XLATRAIN_COORDINATOR"
PROCESSES = "XLATRAIN_PROCESSES"
PROCESS_ID = "XLATRAIN_PROCESS_ID"
LOCAL_PROCESS_ID = "XLATRAIN_LOCAL_PROCESS_ID"
RESUME_SINCE = "XLATRAIN_RESUME_SINCE"
"""Seconds since 1970, set by whoever starts a run again after a failure: checkpoints saved since then are this run's own."""

ELASTIC = "XLATRAIN_ELASTIC"
"""How many processes an elastic launch has when none is lost, of which the global batch is made."""

SECRET = "XLATRAIN_SECRET"
"""What the processes of one launch know and nobody else; made by whoever starts them, the same on all of them."""

ASKED_FOR = "-"
"""In place of the secret where a command line would show it: it comes on standard input."""

POLL_S = 0.02
_PORTS = range(20000, 30000)  # Kubernetes forwards those from 30000 on
_COLOURS = ("36", "33", "32", "35", "34", "31", "96", "93")
_DEVICE_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S*")
_FORWARDED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def launch(
    command: Sequence[str],
    processes: int,
    devices_per_process: int = 1,
    *,
    coordinator_port: int | None = None,
    grace_s: float = 10.0,
    max_restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    output: IO[Any] | None = None,
) -> int:
    """Run ``command`` as ``processes`` processes of one world, and wait for them.

    Each process finds its place in the environment (:func:`xlatrain.cluster.distributed.initialize`). They compute on
    ``devices_per_process`` CPU devices each, unless the environment sets ``JAX_PLATFORMS``. Every line that one prints is printed
    with ``[its id]`` in front. When one fails, the others are stopped. SIGINT, SIGTERM and SIGHUP are passed on; what has
    not ended ``grace_s`` seconds later is killed, and so is everything at a second SIGINT.

    Args:
        command: the program and its arguments, e.g. ``[sys.executable, "train.py"]``.
        processes: how many.
        devices_per_process: CPU devices of each.
        coordinator_port: where process 0 listens; None: a free port.
        grace_s: seconds between asking a process to end and killing it.
        max_restarts: how often all are started again after one has failed; not after a signal to the launcher. They find
            ``XLATRAIN_RESUME_SINCE`` set, by which ``Trainer.fit`` continues from the newest checkpoint of this launch.
        environment: the environment to start from; None: this process's.
        output: a text stream for the output of all; None: ``sys.stdout``.

    Returns:
        0 if every process gave 0; else the status of the first that failed (128 + the signal that ended it), or 128 + the signal
        that ended the launch.

    Raises:
        ValueError: fewer than one process or device, or fewer than no restarts.
    """
    for name, value, least in (
        ("processes", processes, 1),
        ("devices_per_process", devices_per_process, 1),
        ("max_restarts", max_restarts, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    base = dict(os.environ if environment is None else environment)
    if max_restarts:
        base.setdefault(RESUME_SINCE, str(int(time.time())))
    base.setdefault(SECRET, secrets.token_hex(16))
    printer = Printer(sys.stdout if output is None else output, processes)

    def start() -> Iterator[Child]:
        port = coordinator_port or free_port()
        for i in range(processes):
            yield Child(i, command, child_environment(base, i, processes, devices_per_process, port), printer)

    return supervise(start, printer, grace_s, max_restarts)


def supervise(start: Callable[[], Iterable[Child]], printer: Printer, grace_s: float, max_restarts: int) -> int:
    """Start the processes of a world and wait for them; all again when one has failed, ``max_restarts`` times."""
    with Signals() as signals:
        for restart in range(max_restarts + 1):
            if restart:
                printer.say(f"starting again ({restart} of {max_restarts})")
            status, interrupted = _run_once(start, signals, printer, grace_s)
            if status == 0 or interrupted:
                break
    return status


def _run_once(start: Callable[[], Iterable[Child]], signals: Signals, printer: Printer, grace_s: float) -> tuple[int, bool]:
    """The exit status, and whether a signal to the launcher ended it."""
    children: list[Child] = []
    with Guardian() as guardian:
        try:
            for child in start():
                children.append(child)
                guardian.watch(child.group)
            return _watch(children, signals, printer, grace_s), signals.any
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.finish()


def _watch(children: Sequence[Child], signals: Signals, printer: Printer, grace_s: float) -> int:
    """Wait until every child has ended, or must not go on. Returns the status of the launch."""
    status = 0
    deadline: float | None = None
    while running := [child for child in children if child.poll() is None]:
        if status == 0 and (failed := next((child for child in children if child.poll()), None)) is not None:
            status = failed.status()
            printer.say(f"process {failed.index} {failed.how_it_ended()}; stopping the others")
            deadline = stop(running, signal.SIGTERM, grace_s)
        for number in signals.take():
            if status >= 128 and deadline is not None and number == signal.SIGINT:
                return status  # asked for the second time: kill
            printer.say(f"passing {signal.Signals(number).name} on to {len(running)} processes")
            status = status or 128 + number
            deadline = stop(running, number, grace_s)
        if deadline is not None and time.monotonic() > deadline:
            printer.say(f"processes {[child.index for child in running]} did not end within {grace_s:g} s; killing them")
            return status
        time.sleep(POLL_S)
    if status == 0 and (failed := next((child for child in children if child.poll()), None)) is not None:
        status = failed.status()
        printer.say(f"process {failed.index} {failed.how_it_ended()}")
    return status


def stop(running: Iterable[Child], number: int, grace_s: float) -> float:
    for child in running:
        child.signal(number)
    return time.monotonic() + grace_s


class Child:
    """A process of the world, with its process group and its output."""

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        printer: Printer,
        *,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.index = index
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(printer,), name=f"xlatrain-launch-{index}", daemon=True)
        self._reader.start()

    @property
    def group(self) -> int:
        """The process group that it leads."""
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.group, number)

    def kill(self) -> None:
        """End everything that is left of the group, also after its leader has ended."""
        self.signal(signal.SIGKILL)

    def finish(self) -> None:
        self._process.wait()
        self._reader.join(timeout=5)  # a descendant that left the group may hold the pipe

    def status(self) -> int:
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def was_killed(self) -> bool:
        """Whether a signal ended it that is none of ours or JAX's."""
        return self._process.returncode < 0 and -self._process.returncode not in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT)

    def how_it_ended(self) -> str:
        code = self._process.returncode
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def _read(self, printer: Printer) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            for line in _lines(stream):
                printer.line(self.index, line)


def _lines(stream: IO[bytes]) -> Iterator[str]:
    r"""Lines as they come; a progress bar's ``\r`` ends one too."""
    rest = b""
    while chunk := os.read(stream.fileno(), 1 << 16):
        *lines, rest = re.split(rb"\r\n|\n|\r", rest + chunk)
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


class Printer:
    """Prints whole lines of several processes, each with its process in front."""

    def __init__(self, output: IO[Any], processes: int) -> None:
        self._output = output
        self._colour = output.isatty() and "NO_COLOR" not in os.environ
        self._width = len(str(processes - 1))
        self._lock = threading.Lock()

    def line(self, index: int, text: str) -> None:
        self._write(f"[{index:>{self._width}}]", text, _COLOURS[index % len(_COLOURS)])

    def say(self, text: str) -> None:
        self._write("[launch]", text, "1")

    def _write(self, mark: str, text: str, colour: str) -> None:
        if self._colour:
            mark = f"\033[{colour}m{mark}\033[0m"
        with self._lock, suppress(ValueError, BrokenPipeError):  # the reader of our output may be gone
            self._output.write(f"{mark} {text}\n")
            self._output.flush()


class Guardian:
    """A process that outlives a killed launcher, and ends the groups then: their output has no reader any more."""

    _PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
*groups, last = sys.stdin.read().split("\\n")
if groups[-1:] != ["done"]:
    for group in groups:
        try:
            os.killpg(int(group), signal.SIGKILL)
        except ProcessLookupError:
            pass
"""

    def __enter__(self) -> Guardian:
        isolated = [sys.executable, "-I", "-S", "-c", self._PROGRAM]
        self._process = subprocess.Popen(isolated, stdin=subprocess.PIPE, start_new_session=True, text=True)
        return self

    def watch(self, group: int | str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed the guardian: go on without it
            self._process.stdin.write(f"{group}\n")
            self._process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        self.watch("done")
        self._process.communicate()


class Signals:
    """Collects the signals that end a launch, while it lasts."""

    def __init__(self) -> None:
        self.any = False
        self._seen: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _FORWARDED:
                self._before[number] = signal.signal(number, lambda received, _: self._seen.append(received))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> list[int]:
        seen, self._seen[:] = list(self._seen), []
        self.any |= bool(seen)
        return seen


def child_environment(base: Mapping[str, str], index: int, processes: int, devices: int, port: int) -> dict[str, str]:
    """The environment of one process of a pod on this machine."""
    environment = dict(base)
    environment[COORDINATOR] = f"127.0.0.1:{port}"
    environment[PROCESSES] = str(processes)
    environment[PROCESS_ID] = environment[LOCAL_PROCESS_ID] = str(index)
    environment.setdefault("JAX_PLATFORMS", "cpu")
    environment["JAX_NUM_CPU_DEVICES"] = str(devices)
    if flags := environment.get("XLA_FLAGS"):
        environment["XLA_FLAGS"] = _DEVICE_COUNT_FLAG.sub("", flags).strip()  # the older way to say the same, and it would win
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def free_port() -> int:
    """A TCP port of this machine that no process listens on now.

    It is none of those that systems hand out themselves (Linux from 32768 on), where they can be avoided: until process 0 has
    made its imports and listens there, any listener or connection of another program could be given it.
    """
    for port in (*(_PORTS[secrets.randbelow(len(_PORTS))] for _ in range(100)), 0):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return listener.getsockname()[1]
    raise OSError("no TCP port of this machine is free")
