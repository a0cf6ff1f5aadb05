"""The keepers of a launch: one process for each host, in whose memory the state of the run outlives its processes.

Each process gives its shards to the keeper of its own host and to that of its neighbour (:mod:`.keeper`): a process that is
killed leaves them on its host, and a host that is lost on the neighbour. :class:`Keepers` is the launcher's side; what a process
needs to know is in ``XLATRAIN_NEIGHBOUR_MEMORY``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xlatrain.cluster import keeper
from xlatrain.cluster.keeper import Line, Snapshot
from xlatrain.cluster.launch import SECRET
from xlatrain.host.host_memory import available_host_memory

VARIABLE = "XLATRAIN_NEIGHBOUR_MEMORY"


class KeeperError(ConnectionError):
    """A keeper is gone, or has refused what it was asked for."""


@dataclass(frozen=True)
class NeighbourMemory:
    """The keepers as a process is told of them.

    Attributes:
        world: which of the launch's worlds this is: the number of its snapshots, before their own.
        steps: how many optimizer steps may be lost.
        keepers: ``host:port`` of each; first that of this host, then its neighbour's.
    """

    world: int
    steps: int
    keepers: tuple[str, ...]

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> NeighbourMemory | None:
        """The launcher's word; None where it keeps nothing in memory.

        Raises:
            ValueError: no launcher writes that.
        """
        if not (text := environment.get(VARIABLE)):
            return None
        try:
            fields = json.loads(text)
            found = cls(int(fields["world"]), int(fields["steps"]), tuple(map(str, fields["keepers"])))
            if found.steps < 1 or not found.keepers or not environment.get(SECRET):
                raise ValueError("no steps, no keepers, or no secret")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{VARIABLE}={text!r}: `xlatrain launch --memory-steps` sets it ({error}); unset it") from error
        return found


class KeeperConnection:
    """A connection to a keeper; a context manager that closes it.

    Every method raises :class:`KeeperError` where the keeper is gone, or refuses.

    Args:
        address: ``host:port``.
        secret: of the launch.
    """

    def __init__(self, address: str, secret: str | None = None) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        known = os.environ[SECRET] if secret is None else secret
        try:
            self._line = Line(socket.create_connection((host, int(port)), keeper.TIMEOUT_S))
            self._line.greet(known.encode(), keeps=False)
        except OSError as error:
            raise self._gone(error) from error

    def __enter__(self) -> KeeperConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.__exit__()

    def put(self, snapshot: Snapshot, part: int, header: Mapping[str, Any], blobs: Sequence[memoryview | bytes]) -> int:
        """Give it a part of a snapshot; the bytes that it keeps by then."""
        self._ask(do="put", snapshot=snapshot, part=part, header=header, sizes=[len(blob) for blob in blobs])
        try:
            for blob in blobs:
                self._line.send(blob)
        except OSError as error:
            raise self._gone(error) from error
        return self._answer()["held"]

    def parts(self) -> tuple[list[tuple[Snapshot, int, dict[str, Any]]], int]:
        """The parts that it keeps: snapshot, number and header of each; and the process that it is."""
        answer = self._ask(do="list")
        return [((world, number), part, header) for (world, number), part, header in answer["parts"]], answer["pid"]

    def get(self, snapshot: Snapshot, part: int, blob: int) -> bytearray:
        """A blob of a part."""
        size = self._ask(do="get", snapshot=snapshot, part=part, blob=blob)["size"]
        try:
            return self._line.receive(size)
        except OSError as error:
            raise self._gone(error) from error

    def forget(self, before: Snapshot) -> int:
        """Forget the snapshots before that one; the bytes that it still keeps."""
        return self._ask(do="forget", before=before)["held"]

    def take_back(self, snapshot: Snapshot) -> None:
        """Forget that snapshot alone: it will never be complete."""
        self._ask(do="forget", only=snapshot)

    def _ask(self, **request: Any) -> dict[str, Any]:
        try:
            self._line.say(**request)
        except OSError as error:
            raise self._gone(error) from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            answer = self._line.hear()
        except OSError as error:
            raise self._gone(error) from error
        if "refused" in answer:
            raise KeeperError(f"the keeper at {self.address}: {answer['refused']}")
        return answer

    def _gone(self, error: OSError) -> KeeperError:
        return KeeperError(f"the keeper at {self.address} does not answer ({error})")


class Keepers:
    """The keepers that a launcher has started, one for each of its slots; a context manager that ends them.

    Args:
        slots: how many processes the launch has when none is lost.
        steps: how many optimizer steps may be lost; None: nothing is kept, and there are no keepers.
        secret: of the launch.
    """

    def __init__(self, slots: int, steps: int | None, secret: str) -> None:
        self._steps = steps
        self._secret = secret
        self._processes: list[subprocess.Popen[str] | None] = [None] * slots
        self._addresses = [""] * slots
        self._world = 0

    def __enter__(self) -> Keepers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in filter(None, self._processes):
            process.kill()
            process.communicate()

    def begin_world(self, slots: Sequence[int]) -> None:
        """Start those that are missing on the hosts of the next world."""
        self._world += 1
        for slot in () if self._steps is None else slots:
            process = self._processes[slot]
            if process is None or process.poll() is not None:
                self._start(slot)

    def variables(self, slot: int) -> dict[str, str]:
        """The variable of the process in a slot: of keepers that live, those of hosts that are not in this world too."""
        if self._steps is None:
            return {}
        count = len(self._processes)
        order = [(slot + distance) % count for distance in range(count)]
        living = [one for one in order if (process := self._processes[one]) is not None and process.poll() is None]
        told = NeighbourMemory(self._world, self._steps, tuple(self._addresses[one] for one in living))
        return {VARIABLE: json.dumps(asdict(told))}

    def _start(self, slot: int) -> None:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(keeper.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        limit = available_host_memory() // len(self._processes)  # all are on this machine
        process.stdin.write(json.dumps({"secret": self._secret, "limit": limit}) + "\n")
        process.stdin.flush()
        self._addresses[slot] = f"127.0.0.1:{int(process.stdout.readline())}"
        self._processes[slot] = process
