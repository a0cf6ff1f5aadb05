"""Messages between processes: JSON objects, one on each line of a TCP connection."""

from __future__ import annotations

import ipaddress
import json
import socket
from typing import Any

Message = dict[str, Any]
_LIMIT = 1 << 20


class NotOurs(ConnectionError):
    """The other side sent something that is no line of JSON: it is no process of ours."""


class Wire:
    """A connection that carries messages.

    Attributes:
        socket: non-blocking while it is read; give it to a selector.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(5.0)  # limits a send: a message is far smaller than the kernel's buffer
        self.socket = connection
        self._rest = b""

    @property
    def address(self) -> str | None:
        """The address of this host on the connection, where the other side's host reaches it; None: both are on one host."""
        text = self.socket.getsockname()[0].partition("%")[0]
        address = ipaddress.ip_address(text)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped  # the socket listens to both families of addresses
        return None if address.is_loopback or address.is_link_local else str(address)

    def send(self, message: Message) -> None:
        """Raises OSError if the other side is gone, or has not read for long."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The messages that have come; waits for the first as long as the socket's time-out. None: the other side has closed.

        Raises:
            OSError: the connection is lost.
            NotOurs: no JSON.
        """
        data = self.socket.recv(1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LIMIT:
            raise NotOurs("a message without end")
        return [_message(line) for line in lines]

    def close(self) -> None:
        self.socket.close()


def _message(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise NotOurs(f"no message of ours: {line[:80]!r}")
    return message
