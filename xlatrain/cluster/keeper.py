"""The keeper: a process of a host that keeps in its memory what processes of a run give it, and outlives them.

It is run as a file, and needs the standard library alone: it starts at once and takes no memory of its own to speak of. Whoever
starts it writes a line of JSON to its standard input (``secret``, and ``limit``, bytes that it may keep), reads its port
from its standard output, and keeps the input open: the keeper ends with whoever started it.

What it keeps are parts of snapshots: the shards that one process held at one step. Both sides of a connection prove the secret
(HMAC-SHA256 over what both have drawn). Requests and answers are JSON, and blobs follow them as they are:

=========  =========================================================  ==========================================
request    with                                                       answer
=========  =========================================================  ==========================================
``put``    ``snapshot``, ``part``, ``header``, ``sizes``; then blobs  ``held``: bytes that it keeps; or ``refused``
``list``                                                              ``parts``: the header of each; ``held``, ``pid``
``get``    ``snapshot``, ``part``, ``blob``: a number                 ``size``; then the blob. Or ``refused``
``forget``  ``before``: a snapshot, or ``only``: one                  ``held``
=========  =========================================================  ==========================================

A snapshot is ``[world, number]``, which only grow. A part is kept when all of it has come, and until it is forgotten.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
from typing import Any

Snapshot = tuple[int, int]

TIMEOUT_S = 60.0
"""How long either side waits for the other to read, or to say something."""

_LONGEST = 1 << 28  # of a request: the header of a part has a line for each of its arrays
_LENGTH = struct.Struct("!Q")


class Line:
    """A connection between a keeper and a process: messages of any length, and JSON in them.

    Every method raises OSError where the other side is gone, or is silent for :data:`TIMEOUT_S`.

    Args:
        connection: which it closes.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.sendall(_LENGTH.pack(len(data)))
        self._connection.sendall(data)

    def receive(self, longest: int) -> bytearray:
        """A message; a longer one than that is a ConnectionError."""
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if size > longest:
            raise ConnectionError(f"a message of {size} bytes, where at most {longest} were expected")
        return self._exactly(size)

    def say(self, **message: Any) -> None:
        self.send(json.dumps(message).encode())

    def hear(self) -> dict[str, Any]:
        return json.loads(self.receive(_LONGEST))

    def greet(self, secret: bytes, *, keeps: bool) -> None:
        """Prove the secret to each other; ``keeps`` says which side this is.

        Raises:
            ConnectionError: the other side does not know it.
        """
        ours = secrets.token_bytes(16)
        self.send(ours)
        theirs = bytes(self.receive(16))
        drawn = ours + theirs if keeps else theirs + ours
        proofs = {side: hmac.new(secret, side + drawn, hashlib.sha256).digest() for side in (b"keeps", b"asks")}
        if not keeps:
            self.send(proofs[b"asks"])
        if not hmac.compare_digest(bytes(self.receive(32)), proofs[b"asks" if keeps else b"keeps"]):
            raise ConnectionError("the other side does not know the secret of the launch")
        if keeps:
            self.send(proofs[b"keeps"])

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            count = self._connection.recv_into(left)
            if not count:
                raise ConnectionError("the other side has closed the connection")
            left = left[count:]
        return data


class Keeper:
    """Parts of snapshots, by snapshot and number.

    Args:
        limit: bytes of blobs that may be kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: dict[tuple[Snapshot, int], tuple[dict[str, Any], list[bytearray]]] = {}
        self._coming = 0
        self._lock = threading.Lock()

    def serve(self, line: Line) -> None:
        """Answer requests until the connection is closed."""
        answers = {"put": self._put, "list": self._list, "get": self._get, "forget": self._forget}
        while True:
            request = line.hear()
            answers[request["do"]](line, request)

    def _held(self) -> int:
        return sum(len(blob) for _, blobs in self._parts.values() for blob in blobs)

    def _put(self, line: Line, request: dict[str, Any]) -> None:
        size = sum(request["sizes"])
        with self._lock:
            free = self._limit - self._held() - self._coming
            if fits := size <= free:
                self._coming += size
        if not fits:
            line.say(refused=f"{size} bytes have no place: of {self._limit} bytes that it may keep {free} are free")
            return
        try:
            line.say(free=free)
            blobs = [line.receive(expected) for expected in request["sizes"]]
            if [len(blob) for blob in blobs] != request["sizes"]:
                raise ConnectionError("blobs of other sizes than announced")
        finally:
            with self._lock:
                self._coming -= size
        with self._lock:
            self._parts[_snapshot(request["snapshot"]), int(request["part"])] = request["header"], blobs
            held = self._held()
        line.say(held=held)

    def _list(self, line: Line, _: dict[str, Any]) -> None:
        with self._lock:
            parts = [[*key, header] for key, (header, _) in self._parts.items()]
            held = self._held()
        line.say(parts=parts, held=held, pid=os.getpid())

    def _get(self, line: Line, request: dict[str, Any]) -> None:
        with self._lock:
            _, blobs = self._parts.get((_snapshot(request["snapshot"]), request["part"]), ({}, []))
        if not 0 <= request["blob"] < len(blobs):
            line.say(refused="it keeps no such part")
            return
        line.say(size=len(blobs[request["blob"]]))
        line.send(blobs[request["blob"]])

    def _forget(self, line: Line, request: dict[str, Any]) -> None:
        only = "only" in request
        named = _snapshot(request["only" if only else "before"])
        with self._lock:
            self._parts = {key: part for key, part in self._parts.items() if (key[0] != named if only else key[0] >= named)}
            held = self._held()
        line.say(held=held)


def _snapshot(given: list[int]) -> Snapshot:
    world, number = given
    return int(world), int(number)


def _attend(connection: socket.socket, keeper: Keeper, secret: bytes) -> None:
    """Serve whoever proves the secret; anybody else, and who breaks off, is dropped."""
    with Line(connection) as line:
        try:
            line.greet(secret, keeps=True)
            keeper.serve(line)
        except Exception:  # whatever comes from the network ends its connection only
            return


def _listen(listener: socket.socket, keeper: Keeper, secret: bytes) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_attend, args=(connection, keeper, secret), daemon=True).start()


def main() -> None:
    """Serve until standard input ends."""
    settings = json.loads(sys.stdin.readline())
    listener = socket.create_server(("127.0.0.1", 0))
    listening = (listener, Keeper(settings["limit"]), settings["secret"].encode())
    threading.Thread(target=_listen, args=listening, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
