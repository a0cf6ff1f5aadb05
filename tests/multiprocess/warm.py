"""Starts Python scripts that need not import PyTorch and JAX first: one process has, and each script is a fork of it.

A child runs and ends as ``python script.py …`` does, with its own environment, standard streams and exit status. JAX has started
no backend before the fork; what it reads of the environment when it is imported is set in the child.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch_compat.callbacks", "torch_compat.preflight", "torch_compat.strategies", "torch_compat.trainer.compiled",
    "torch_compat.trainer.trainer", "torch_compat.functional.step_capture", "torch._dynamo", "torch.export", "torch.onnx",
    "optax", "xlatrain.bridge.capture", "xlatrain.bridge.lowerings", "xlatrain.checkpoint", "xlatrain.optimizers",
)  # fmt: skip
"""What a run imports when it is needed, too."""


class Child:
    """A script that runs.

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

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
            time.sleep(0.003)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process whose forks the scripts are; a context manager that ends it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def start(self, script: Path, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> Child:
        """Run a script; what it writes is appended to ``output``."""
        request = {"script": str(script), "arguments": list(arguments), "environment": dict(environment), "output": str(output)}
        return Child(self, self.ask(request))

    def ask(self, request: Mapping[str, Any]) -> Any:
        """One request, one answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _serve() -> dict[str, Any] | None:
    """Answer requests; gives the request in a child that is to run it, and None in the server at its end."""
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            running -= {pid}
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                return request
            running.add(answer)
        print(json.dumps(answer), flush=True)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return None


def _run(script: str, arguments: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    import jax

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    jax.config.update("jax_platforms", environment["JAX_PLATFORMS"])
    jax.config.update("jax_num_cpu_devices", int(environment["JAX_NUM_CPU_DEVICES"]))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        __import__(name)
    if (asked := _serve()) is not None:
        _run(**asked)
