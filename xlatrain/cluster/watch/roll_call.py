"""The roll call: before JAX's coordination service takes the coordinator's port, every process reports there to process 0."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NoReturn

from xlatrain.cluster.launch import SECRET
from xlatrain.cluster.watch.settings import JOIN_WITHIN, secret
from xlatrain.cluster.watch.verdict import HELLO, Peer, is_well_formed
from xlatrain.cluster.watch.wire import Message, NotOurs, Wire

_MARK = "xlatrain-watch"
_RETRY_S = 0.1
_CHALLENGE_S = 10.0
_STRANGERS = 64  # silent connections that are borne beside the processes' own
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
    roll = _Roll(introduction(0, count), secret())
    deadline = time.monotonic() + timeout
    with _listen(address) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while roll.missing:
            left = deadline - time.monotonic()
            if left <= 0:
                roll.refuse(
                    f"{_numbers(roll.missing)} of {count} did not come within {timeout:g} s ({JOIN_WITHIN}){roll.strangers}. "
                    f"Here: {', '.join(str(peer) for peer in roll.present)}. Look in the log of the missing for an error, and "
                    f"whether it was started at all and reaches {address}"
                )
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    if (wire := roll.meet(listener)) is not None:
                        selector.register(wire.socket, selectors.EVENT_READ, wire)
                elif not roll.hear(key.data):
                    selector.unregister(key.fileobj)
                    key.data.close()
            for wire in roll.too_many():
                selector.unregister(wire.socket)
                wire.close()
        roll.part_from_strangers()
    seen_at = next((wire.address for _, wire in roll.here.values() if wire.address), None)
    for process in list(roll.here):
        with contextlib.suppress(OSError):  # it is gone again: the watch says so
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
            if (known := secret()) is not None:
                wire.prove(known, _challenge(wire, address), asks=False)
            wire.send(introduction(process, count))
            reply = _reply(wire, deadline, address)
            break
        except OSError as error:  # process 0 was started again, or the port was somebody else's a moment ago
            wire.close()
            if time.monotonic() > deadline:
                raise JoinError(f"the program that listens at {address} does not answer process {process}: {error}") from error
            time.sleep(_RETRY_S)
    if "refused" in reply:
        wire.close()
        raise JoinError(str(reply["refused"]))
    welcome = reply["go"]
    # JAX's service comes up now; its client would wait a second before it tried again.
    _reach(address, process, max(deadline, time.monotonic() + 10.0), timeout).close()
    return Peer.of_hello(welcome, time.monotonic()), wire, welcome


class _Roll:
    """The roll of the processes that have come, at process 0.

    Attributes:
        here: those who have.
        dropped: how many others called, or said what no process of ours says.

    Args:
        me: what process 0 says of itself.
        known: the launch's secret, which everybody proves to know.
    """

    def __init__(self, me: Message, known: str | None = None) -> None:
        self._me = me
        self._count: int = me["count"]
        self._secret = known
        self._waiting: dict[Wire, None] = {}
        self.here: dict[int, tuple[Peer, Wire]] = {}
        self.dropped = 0

    @property
    def strangers(self) -> str:
        """In the error of somebody who did not come: others did."""
        if not self.dropped:
            return ""
        proof = f" (is {SECRET} the same on every process?)" if self._secret else ""
        return f"; {self.dropped} messages that are none of this run's were dropped{proof}"

    def meet(self, listener: socket.socket) -> Wire | None:
        """Somebody calls: the connection, or None where it is gone already."""
        try:
            wire = Wire(listener.accept()[0])
            if self._secret is not None:
                challenge = secrets.token_hex(16)
                wire.send({"challenge": challenge})
                wire.prove(self._secret, challenge, asks=True)
        except OSError:
            return None
        self._waiting[wire] = None
        return wire

    def too_many(self) -> list[Wire]:
        """Connections that say nothing, the oldest first, where there are more than all processes need."""
        found = list(self._waiting)[: max(0, len(self._waiting) - _STRANGERS - self._count)]
        for wire in found:
            del self._waiting[wire]
            self.dropped += 1
        return found

    def part_from_strangers(self) -> None:
        """All are here."""
        for wire in self._waiting:
            wire.close()

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
        except NotOurs:
            self.dropped += 1
            messages = None
        except OSError:
            messages = None
        if messages is None:
            self._forget(wire)
            return False
        for message in messages:
            if message.get(_MARK) != 1 or not is_well_formed(message, HELLO):
                self.dropped += 1
                self._forget(wire)
                return False
            self._enter(message, wire)
            self._waiting.pop(wire, None)
        return True

    def _forget(self, wire: Wire) -> None:
        self._waiting.pop(wire, None)
        self.here = {process: entry for process, entry in self.here.items() if entry[1] is not wire}

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


def listening_address(address: str) -> str:
    """Where process 0 listens: at the coordinator's address alone where only this host reaches it, else at every one.

    Args:
        address: ``host:port`` of the coordinator.
    """
    host, port = address.rsplit(":", 1)
    return address if host in ("127.0.0.1", "localhost", "[::1]") else f"[::]:{port}"


def _listen(address: str) -> socket.socket:
    bind = os.environ.get(_BIND_ADDRESS) or listening_address(address)
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


def _challenge(wire: Wire, address: str) -> str:
    """The challenge that process 0 sends: the random text for which it wants a proof of the secret."""
    wire.socket.settimeout(_CHALLENGE_S)
    try:
        messages = wire.receive()
    except (NotOurs, TimeoutError):
        messages = []
    if messages is None:
        raise ConnectionError("process 0 closed the connection")
    wire.socket.settimeout(5.0)
    if len(messages) != 1 or not isinstance(messages[0].get("challenge"), str):
        raise JoinError(
            f"the program that listens at {address} is not process 0 of this run: it does not ask for the proof of {SECRET}. Is "
            "it set there, or does another run listen at that port?"
        )
    return messages[0]["challenge"]


def _reply(wire: Wire, deadline: float, address: str) -> Message:
    """Process 0's answer. It has the same deadline, counted from its own start, and says who is missing: wait a little longer."""
    while True:
        wire.socket.settimeout(max(1.0, deadline + 5.0 - time.monotonic()))
        try:
            messages = wire.receive()
        except NotOurs as error:
            raise JoinError(
                f"the program that listens at {address} is no process 0 that calls the roll: {error}. Is it another run's, is "
                f"XLATRAIN_WATCH=0 set on process 0 alone, or is {SECRET} not the same there?"
            ) from error
        except TimeoutError as error:
            raise JoinError(f"process 0 at {address} took the call but does not answer: look in its log") from error
        if messages is None:
            raise ConnectionError("process 0 closed the connection")
        for message in messages:
            if is_well_formed(message.get("go"), HELLO) or isinstance(message.get("refused"), str):
                wire.socket.settimeout(5.0)
                return message


def _numbers(processes: list[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
