"""A pod of several hosts, reached by ssh: one process of the same command on each."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from xlatrain.cluster.launch import (
    ASKED_FOR,
    COORDINATOR,
    LOCAL_PROCESS_ID,
    PROCESS_ID,
    PROCESSES,
    RESUME_SINCE,
    SECRET,
    Child,
    Printer,
    supervise,
)

PORT = 8476
"""Where process 0 listens unless said otherwise: JAX's own choice on TPU pods."""

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""No questions; a host that does not answer for a minute is lost."""

_HOST = re.compile(r"([A-Za-z0-9_.-]+@)?([A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:]+\])")


def launch_on_hosts(
    hosts: Sequence[str],
    arguments: Sequence[str],
    *,
    python: str = sys.executable,
    directory: str | None = None,
    port: int = PORT,
    variables: Mapping[str, str] | None = None,
    grace_s: float = 10.0,
    max_restarts: int = 0,
    output: IO[Any] | None = None,
) -> int:
    """Run ``python arguments…`` on every host, as one world; like :func:`xlatrain.cluster.launch.launch` otherwise.

    Process i runs on ``hosts[i]`` and computes on the devices that it finds there. The hosts need the same files at the same
    paths, xlatrain installed, and a key that lets ssh in without asking. When this process, or its connection to a host, is gone,
    what runs there is ended.

    Args:
        hosts: names or addresses, as for ssh (``user@host``); the others must reach the first by its name.
        arguments: of Python: the script, or ``-m`` and the module, and its arguments.
        python: the interpreter on the hosts.
        directory: where to run there; None: the same path as the current directory here.
        port: on the first host, where process 0 listens.
        variables: for the processes, beside the ones that make the world; seen in the hosts' process lists.
        grace_s: seconds between asking a process to end and killing it.
        max_restarts: how often all are started again after a failure.
        output: a text stream for the output of all; None: ``sys.stdout``.

    Returns:
        The exit status, as of ``launch``; 255 where ssh itself failed.

    Raises:
        ValueError: no hosts, or what is no host.
    """
    if max_restarts < 0:
        raise ValueError(f"max_restarts must be at least 0, not {max_restarts}")
    variables = dict(variables or {})
    known = variables.pop(SECRET, None) or os.environ.get(SECRET) or secrets.token_hex(16)
    variables[SECRET] = ASKED_FOR  # the secret itself goes over the connection: command lines are seen by everybody there
    if max_restarts:
        variables = {RESUME_SINCE: str(int(time.time())), **variables}
    commands = ssh_commands(hosts, arguments, python=python, directory=directory, port=port, variables=variables)
    printer = Printer(sys.stdout if output is None else output, len(hosts))

    def start() -> list[Child]:
        return [_Remote(i, command, os.environ, printer, hosts[i], known) for i, command in enumerate(commands)]

    return supervise(start, printer, grace_s, max_restarts)


def ssh_commands(
    hosts: Sequence[str],
    arguments: Sequence[str],
    *,
    python: str = sys.executable,
    directory: str | None = None,
    port: int = PORT,
    variables: Mapping[str, str] | None = None,
) -> list[list[str]]:
    """The ssh command for each host; arguments as of :func:`launch_on_hosts`.

    Raises:
        ValueError: there is no host, or a text that names none.
    """
    if not hosts:
        raise ValueError("there must be at least one host")
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ValueError(f"{host!r} is not a host: name, address or user@name is expected, as for ssh")
    address = f"{hosts[0].rpartition('@')[2]}:{port}"
    where = os.getcwd() if directory is None else directory
    commands = []
    for i, host in enumerate(hosts):
        place = {COORDINATOR: address, PROCESSES: str(len(hosts)), PROCESS_ID: str(i), LOCAL_PROCESS_ID: "0"}
        pairs = {"PYTHONUNBUFFERED": "1", **(variables or {}), **place}
        program = [
            "env",
            *(f"{name}={value}" for name, value in pairs.items()),
            python,
            "-m",
            "xlatrain.cluster.remote_child",
            python,
            *arguments,
        ]
        commands.append([*SSH, host, f"cd {shlex.quote(where)} && exec {shlex.join(program)}"])
    return commands


class _Remote(Child):
    """A process at the other end of an ssh connection, with :mod:`xlatrain.cluster.remote_child` between."""

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], printer: Printer, host: str, known: str
    ) -> None:
        self._host = host
        super().__init__(index, command, environment, printer, stdin=subprocess.PIPE)
        self._tell(known.encode())

    def signal(self, number: int) -> None:
        self._tell(b"%d" % number)

    def _tell(self, text: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the connection is gone, and the relay has seen that
            self._process.stdin.write(text + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the remote process, and then the connection."""
        self.signal(9)
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        super().signal(9)

    def how_it_ended(self) -> str:
        lost = "; ssh could not connect, or the connection was lost" if self._process.returncode == 255 else ""
        return f"on {self._host} {super().how_it_ended()}{lost}"
