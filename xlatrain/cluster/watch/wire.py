"""Messages between processes: JSON objects, one on each line of a TCP connection, each with a proof where there is a secret."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import socket
from typing import Any

Message = dict[str, Any]
_LIMIT = 1 << 20
_PROOF = 64  # hexadecimal digits


class NotOurs(ConnectionError):
    """Received bytes are no message of this run: the other side is another program, or does not know the secret."""


class Wire:
    """A connection to another process, which sends and receives messages.

    Attributes:
        socket: non-blocking while it is read; give it to a selector.
        dropped: how many messages were not ours.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(5.0)  # limits a send: a message is far smaller than the kernel's buffer
        self.socket = connection
        self.dropped = 0
        self._rest = b""
        self._secret: bytes | None = None
        self._sent = self._received = 0
        self._directions = (b"", b"")

    @property
    def address(self) -> str | None:
        """This host's address on the connection, where the other side's host reaches it; None: both are on one host."""
        text = self.socket.getsockname()[0].partition("%")[0]
        address = ipaddress.ip_address(text)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped  # the socket listens to both families of addresses
        return None if address.is_loopback or address.is_link_local else str(address)

    def prove(self, secret: str, challenge: str, *, asks: bool) -> None:
        """From now on every message carries a proof of the secret, for this connection, direction and place in the order alone.

        Args:
            secret: of the launch.
            challenge: what the side that listens has drawn for this connection.
            asks: this is that side.
        """
        self._secret = f"{secret}\0{challenge}".encode()
        self._directions = (b"from", b"to") if asks else (b"to", b"from")

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other side is gone, or has not read for long."""
        text = json.dumps(message).encode()
        if self._secret is not None:
            text = self._proof(self._directions[0], self._sent, text) + text
            self._sent += 1
        self.socket.sendall(text + b"\n")

    def receive(self, *, strict: bool = True) -> list[Message] | None:
        """Messages that have come; waits for some as long as the socket's time-out. None: the other side has closed.

        Args:
            strict: False drops what is no message of ours, and counts it.

        Raises:
            OSError: the connection is lost.
            NotOurs: ``strict``, and what came is no message of ours.
        """
        data = self.socket.recv(1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LIMIT:
            self._rest = b""
            lines.append(b"a message without end")
        messages = []
        for line in lines:
            try:
                messages.append(self._message(line))
            except NotOurs:
                self.dropped += 1
                if strict:
                    raise
        return messages

    def close(self) -> None:
        self.socket.close()

    def _message(self, line: bytes) -> Message:
        text = line
        if self._secret is not None:
            proof, text = line[:_PROOF], line[_PROOF:]
            if not hmac.compare_digest(proof, self._proof(self._directions[1], self._received, text)):
                raise NotOurs(f"no proof of the secret: {line[:80]!r}")
            self._received += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise NotOurs(f"no message of ours: {line[:80]!r}")
        return message

    def _proof(self, direction: bytes, number: int, text: bytes) -> bytes:
        assert self._secret is not None
        return hmac.new(self._secret, b"%s %d %s" % (direction, number, text), hashlib.sha256).hexdigest().encode()
