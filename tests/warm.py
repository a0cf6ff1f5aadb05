"""Starts Python programs that need not import PyTorch and JAX first: one process has, and each program is a fork of it.

A child runs and ends as ``python script.py …``, ``python -m module …`` or ``python -c program …`` does, with its own environment,
standard streams and exit status. JAX has started no backend before the fork; what it reads of the environment when it is
imported is set in the child.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from xlatrain.cluster.launch import child_environment, free_port
from xlatrain.host.garbage import uncollected

OURS = (
    "torch_compat.callbacks", "torch_compat.preflight", "torch_compat.strategies", "torch_compat.step.mesh_step_runner",
    "torch_compat.trainer.trainer", "torch_compat.step.capture.step_capture", "torch._dynamo", "torch.export", "torch.onnx",
    "optax", "xlatrain.bridge.capture.capture", "xlatrain.bridge.lower.lowerings", "xlatrain.checkpoint",
    "xlatrain.step.optimizers", "jaxlib.mlir.dialects.mhlo", "torch.utils.serialization",
)  # fmt: skip
"""What a run imports when it is needed, too; not torchmetrics, which only runs that use it import."""

STOCK = ("lightning.pytorch", "lightning.fabric", "torch._dynamo")

BOTH = (*STOCK, *OURS)
"""For stock's own Trainer with :class:`xlatrain.lightning.MeshStrategy`."""


class Child:
    """A program that runs.

    Attributes:
        pid: of its process.
        returncode: as :class:`subprocess.Popen` gives it; None while it runs, as far as :meth:`poll` has seen.
    """

    def __init__(self, server: Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float, *, every: float = 0.003) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
            time.sleep(every)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process whose forks the programs are; a context manager that ends it."""

    def __init__(self, preloaded: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *preloaded],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, and every program that still runs."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: Path,
        *,
        errors: Path | None = None,
        folder: Path | None = None,
    ) -> Child:
        """Run a program.

        Args:
            command: what would follow ``python``: a script, ``-m`` and a module, or ``-c`` and a program; and arguments.
            environment: the whole of it.
            output: what it writes is appended here.
            errors: what it writes to standard error goes here instead.
            folder: its working directory; default: this process's.
        """
        request = {
            "command": list(command),
            "environment": dict(environment),
            "output": str(output),
            "errors": str(errors or output),
            "folder": str(folder or Path.cwd()),
        }
        return Child(self, self.ask(request))

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request and return the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


_servers: dict[tuple[str, ...], Server] = {}


def server(preloaded: tuple[str, ...], environment: Mapping[str, str]) -> Server:
    """The server of this process that has imported these; the first call starts it."""
    if preloaded not in _servers:
        chosen_by_a_run = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTHONWARNINGS")
        of_all = {name: value for name, value in environment.items() if name not in chosen_by_a_run}
        _servers[preloaded] = Server(preloaded, of_all)
        atexit.register(_servers[preloaded].close)
    return _servers[preloaded]


def run(
    preloaded: tuple[str, ...],
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout: float,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run([python, *command], capture_output=True, text=True)``, forked from the server that has these.

    Raises:
        TimeoutError: it was ended after ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        child = server(preloaded, env).start(command, env, output, errors=errors, folder=cwd)
        try:
            child.wait(timeout, every=0.02)
        finally:
            child.kill()
        return subprocess.CompletedProcess(list(command), child.wait(timeout), output.read_text(), errors.read_text())


def run_pod(
    command: Sequence[str],
    processes: int,
    devices: int,
    *,
    env: Mapping[str, str],
    timeout: float,
    cwd: Path | None = None,
    preloaded: tuple[str, ...] = OURS,
) -> subprocess.CompletedProcess[str]:
    """Run a command as the processes of a pod, as ``xlatrain launch`` does; when one fails, the others are ended.

    Its exit status is the first that is not 0, its output that of all processes, one after another.
    """
    port = free_port()
    environments = [child_environment(env, process, processes, devices, port) for process in range(processes)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(process) for process in range(processes)]
        forks = server(preloaded, environments[0])
        children = [forks.start(command, own, output, folder=cwd) for own, output in zip(environments, outputs, strict=True)]
        try:
            failed = _first_failure(children, timeout)
        finally:
            for child in children:
                child.kill()
                child.wait(timeout)
        said = "\n".join(f"process {process}:\n{output.read_text()}" for process, output in enumerate(outputs))
        return subprocess.CompletedProcess(list(command), failed, said, "")


def _first_failure(children: Sequence[Child], timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while None in (statuses := [child.poll() for child in children]) and not any(statuses):
        if time.monotonic() > deadline:
            running = [process for process, status in enumerate(statuses) if status is None]
            raise TimeoutError(f"processes {running} still run after {timeout} s")
        time.sleep(0.02)
    return next((status for status in statuses if status), 0)


def _serve() -> dict[str, Any] | None:
    """Answer requests; gives the request in a child that is to run it, and None in the server at its end."""
    gc.freeze()  # a child's collections then leave the pages that it shares as they are
    gc.set_threshold(20_000, 20, 50)  # at 700 new objects a fifteenth of a capturing child's time is spent on collections
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            running -= {pid}
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # JAX warns of forks, which its backends do not survive: there is none yet
                answer = os.fork()
            if not answer:
                return request
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return None


def _run(command: Sequence[str], environment: Mapping[str, str], output: str, errors: str, folder: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    os.chdir(folder)
    _take_environment(environment)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)
    else:
        sys.argv = list(command)
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def _leave(imported: Sequence[str]) -> None:
    """Leave modules to the system, after all else that is done at the end of a process.

    Python would empty them one by one, which takes half a second: each of their pages is the server's until it is written to.
    What the program has imported and made itself ends as ever.
    """
    for name in imported:
        if (module := sys.modules.pop(name, None)) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


def _take_environment(environment: Mapping[str, str]) -> None:
    """Become the environment; what Python and JAX have read of the server's is read again."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path not in sys.path]
    if action := environment.get("PYTHONWARNINGS"):
        warnings.simplefilter(action, append=True)  # behind those of what has been imported
    jax = sys.modules.get("jax")
    for name in sorted(name for name in before.keys() | environment.keys() if name.startswith("JAX_") and jax is not None):
        if name not in environment:
            raise ValueError(f"{name} is set where the imports were made: start a server of your own without it")
        if (value := environment[name]) != before.get(name):
            jax.config.update(name.lower(), int(value) if value.isdecimal() else value)


if __name__ == "__main__":
    _imported: list[str] = []
    atexit.register(_leave, _imported)  # before all others, and so called after them
    with uncollected():
        for name in sys.argv[1:]:
            __import__(name)
    _imported += [name for name in sys.modules if name not in (*sys.builtin_module_names, "__main__")]
    if (asked := _serve()) is not None:
        _run(**asked)
