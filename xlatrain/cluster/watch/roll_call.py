"""The roll call: before JAX's coordination service takes the coordinator's port, every process reports there to process 0."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NoReturn

from xlatrain.cluster.watch.settings import JOIN_WITHIN
from xlatrain.cluster.watch.verdict import Peer
from xlatrain.cluster.watch.wire import Message, NotOurs, Wire

_MARK = "xlatrain-watch"
_RETRY_S = 0.1
_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"


class JoinError(RuntimeError):
    """The processes could not form one world; names those that did not come, or do not belong to it."""


def introduction(process: int, count: int) -> Message:
    """The message with which a process introduces itself."""
    versions = {package: version(package) for package in ("xlatrain", "jax", "jaxlib")}
    me = {"process": process, "count": count, "host": socket.gethostname(), "pid": os.getpid()}
    return {_MARK: 1, **me, "versions": versions}


def call_roll(
    address: str, count: int, timeout: float, welcome: Mapping[str, Any]
) -> tuple[dict[int, tuple[Peer, Wire]], str | None]:
    """Called by process 0: wait for all others, and give the port free again.

    Args:
        address: ``host:port``; it listens on that port, at every address of this host (``JAX_COORDINATOR_BIND_ADDRESS``).
        count: processes of the world.
        timeout: seconds to wait.
        welcome: what they are told when all have come.

    Returns:
        the others, and this host's address where those on other hosts reach it (None: all are on this one).

    Raises:
        JoinError: names who did not come; everybody who did raises the same.
        OSError: the port is taken.
    """
    roll = _Roll(introduction(0, count))
    deadline = time.monotonic() + timeout
    with _listen(address) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while roll.missing:
            left = deadline - time.monotonic()
            if left <= 0:
                roll.refuse(
                    f"{_numbers(roll.missing)} of {count} did not come within {timeout:g} s ({JOIN_WITHIN}). "
                    f"Here: {', '.join(str(peer) for peer in roll.present)}. Look in the log of the missing for an error, and "
                    f"whether it was started at all and reaches {address}"
                )
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    wire = Wire(listener.accept()[0])
                    selector.register(wire.socket, selectors.EVENT_READ, wire)
                elif not roll.hear(key.data):
                    selector.unregister(key.fileobj)
                    key.data.close()
    seen_at = next((wire.address for _, wire in roll.here.values() if wire.address), None)
    for process in list(roll.here):
        roll.here[process][1].send({"go": {**introduction(0, count), "address": seen_at, **welcome}})
    return roll.here, seen_at


def answer_roll(address: str, process: int, count: int, timeout: float) -> tuple[Peer, Wire, Message]:
    """Called by every other process: report to process 0, and wait until all have.

    Returns:
        process 0, the connection to it, and its welcome; JAX's service listens at ``address`` now.

    Raises:
        JoinError: process 0 did not come, or says who did not, or that this process does not belong.
    """
    deadline = time.monotonic() + timeout
    while True:
        wire = _reach(address, process, deadline, timeout)
        try:
            wire.send(introduction(process, count))
            reply = _reply(wire, deadline, address)
            break
        except OSError as error:  # process 0 was started again, or the port was somebody else's a moment ago
            wire.close()
            if time.monotonic() > deadline:
                raise JoinError(f"what listens at {address} does not answer process {process}: {error}") from error
            time.sleep(_RETRY_S)
    if "refused" in reply:
        wire.close()
        raise JoinError(str(reply["refused"]))
    welcome = reply["go"]
    # JAX's service comes up now; its client would wait a second before it tried again.
    _reach(address, process, max(deadline, time.monotonic() + 10.0), timeout).close()
    return Peer.of_hello(welcome, time.monotonic()), wire, welcome


class _Roll:
    """The roll of the processes that have come, at process 0."""

    def __init__(self, me: Message) -> None:
        self._me = me
        self._count: int = me["count"]
        self.here: dict[int, tuple[Peer, Wire]] = {}

    @property
    def missing(self) -> list[int]:
        return [process for process in range(1, self._count) if process not in self.here]

    @property
    def present(self) -> list[Peer]:
        return [Peer.of_hello(self._me, 0.0), *(peer for _, (peer, _) in sorted(self.here.items()))]

    def hear(self, wire: Wire) -> bool:
        """Read what came; False if the other side is gone, or nobody of ours."""
        try:
            messages = wire.receive()
        except OSError:
            messages = None
        if messages is None:
            self.here = {process: entry for process, entry in self.here.items() if entry[1] is not wire}
            return False
        for message in messages:
            if message.get(_MARK) != 1:
                return False
            self._enter(message, wire)
        return True

    def _enter(self, hello: Message, wire: Wire) -> None:
        peer = Peer.of_hello(hello, time.monotonic())
        known = self.here.setdefault(peer.process, (peer, wire))[0]
        if hello["count"] != self._count:
            self.refuse(
                f"{peer} was started as one of {hello['count']} processes, {self.present[0]} as one of {self._count}", wire
            )
        if not 0 < peer.process < self._count or known is not peer:
            other = self.present[0] if peer.process == 0 else known
            self.refuse(
                f"two processes say that they are process {peer.process}: {peer} and {other}; each needs its own number", wire
            )
        if hello["versions"] != self._me["versions"]:
            pairs = {
                name: (hello["versions"].get(name), mine)
                for name, mine in self._me["versions"].items()
                if hello["versions"].get(name) != mine
            }
            found = "; ".join(f"{name} {theirs} there, {mine} on {self.present[0]}" for name, (theirs, mine) in pairs.items())
            self.refuse(f"{peer} has other versions: {found}. Install the same on every host")

    def refuse(self, text: str, *also: Wire) -> NoReturn:
        """Tell everybody who has come, and raise."""
        for wire in {*(wire for _, wire in self.here.values()), *also}:
            with contextlib.suppress(OSError):
                wire.send({"refused": text})
            wire.close()
        raise JoinError(text)


def _listen(address: str) -> socket.socket:
    bind = os.environ.get(_BIND_ADDRESS) or f"[::]:{address.rsplit(':', 1)[1]}"
    host, port = bind.rsplit(":", 1)
    host = host.strip("[]")
    if host in ("::", "") and socket.has_dualstack_ipv6():
        return socket.create_server(("", int(port)), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("" if host == "::" else host, int(port)), backlog=1024)


def _connect(address: str, timeout: float) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)), timeout)


def _reach(address: str, process: int, deadline: float, timeout: float) -> Wire:
    while True:
        try:
            return Wire(_connect(address, max(0.1, min(5.0, deadline - time.monotonic()))))
        except OSError as error:
            if time.monotonic() > deadline:
                raise JoinError(
                    f"process {process} (host {socket.gethostname()}) could not reach process 0 at {address} within "
                    f"{timeout:g} s ({JOIN_WITHIN}): {error}. Is process 0 running, is that its address, and is the port open?"
                ) from error
            time.sleep(_RETRY_S)


def _reply(wire: Wire, deadline: float, address: str) -> Message:
    """Process 0's answer. It has the same deadline, counted from its own start, and says who is missing: wait a little longer."""
    while True:
        wire.socket.settimeout(max(1.0, deadline + 5.0 - time.monotonic()))
        try:
            messages = wire.receive()
        except NotOurs as error:
            raise JoinError(
                f"what listens at {address} is no process 0 that calls the roll: {error}. Is another run's there, or is "
                "XLATRAIN_WATCH=0 set on process 0 alone?"
            ) from error
        except TimeoutError as error:
            raise JoinError(f"process 0 at {address} took the call but does not answer: look in its log") from error
        if messages is None:
            raise ConnectionError("process 0 closed the connection")
        for message in messages:
            if "go" in message or "refused" in message:
                wire.socket.settimeout(5.0)
                return message


def _numbers(processes: list[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
