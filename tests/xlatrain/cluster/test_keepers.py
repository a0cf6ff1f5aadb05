"""Keepers keep what whoever knows the secret gives them, until their launcher ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Iterator

import pytest

from xlatrain.cluster.keepers import VARIABLE, KeeperConnection, KeeperError, Keepers, NeighbourMemory
from xlatrain.cluster.launch import SECRET


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keepers]:
    monkeypatch.setenv("XLATRAIN_HOST_MEMORY", "2000")
    with Keepers(2, 4, "known") as started:
        started.begin_world([0, 1])
        yield started


def told(keepers: Keepers, slot: int) -> NeighbourMemory:
    found = NeighbourMemory.of_environment({**keepers.variables(slot), SECRET: "known"})
    assert found is not None
    return found


def test_a_part_is_kept_until_it_is_forgotten(keepers: Keepers) -> None:
    with KeeperConnection(told(keepers, 0).keepers[0], "known") as keeper:
        assert keeper.put((1, 1), 0, {"step": 3}, [b"abc", b"", memoryview(b"de")]) == 5
        assert keeper.put((1, 2), 0, {"step": 4}, [b"xyz"]) == 8
        assert keeper.parts()[0] == [((1, 1), 0, {"step": 3}), ((1, 2), 0, {"step": 4})]
        assert [bytes(keeper.get((1, 1), 0, blob)) for blob in range(3)] == [b"abc", b"", b"de"]
        assert keeper.forget((1, 2)) == 3
        with pytest.raises(KeeperError, match="it keeps no such part"):
            keeper.get((1, 1), 0, 0)
        assert bytes(keeper.get((1, 2), 0, 0)) == b"xyz"
        keeper.put((1, 3), 0, {}, [b"incomplete"])
        keeper.put((1, 3), 1, {}, [b"too"])
        keeper.take_back((1, 3))
        assert [snapshot for snapshot, _, _ in keeper.parts()[0]] == [(1, 2)]


def test_what_has_no_place_is_refused_and_the_rest_stays(keepers: Keepers) -> None:
    with KeeperConnection(told(keepers, 0).keepers[0], "known") as keeper:  # half of the 2000 bytes
        keeper.put((1, 1), 0, {}, [b"." * 600])
        with pytest.raises(KeeperError, match="600 bytes have no place: of 1000 bytes that it may keep 400 are free"):
            keeper.put((1, 2), 0, {}, [b"." * 600])
        assert keeper.put((1, 3), 0, {}, [b"." * 400]) == 1000


def test_who_breaks_off_leaves_nothing(keepers: Keepers) -> None:
    address = told(keepers, 0).keepers[0]
    with KeeperConnection(address, "known") as keeper:
        keeper._line.say(do="put", snapshot=(1, 1), part=0, header={}, sizes=[600])
        keeper._line.hear()
        keeper._line.send(b"." * 599)  # another length than it has announced, which ends the connection
        with pytest.raises(OSError):
            keeper._line.hear()
    with KeeperConnection(address, "known") as keeper:
        assert keeper.parts()[0] == []
        assert keeper.put((1, 2), 0, {}, [b"." * 1000]) == 1000


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 8, (16).to_bytes(8, "big") + b"." * 16 + (32).to_bytes(8, "big") + b"." * 32]
)
def test_strangers_are_dropped(keepers: Keepers, noise: bytes) -> None:
    host, _, port = told(keepers, 0).keepers[0].rpartition(":")
    stranger = socket.create_connection((host, int(port)), 60)
    with stranger, contextlib.suppress(OSError):  # it may have been dropped before all is said
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(100):  # its challenge, and then the end
            pass
    with pytest.raises(KeeperError, match="does not answer"):
        KeeperConnection(f"{host}:{port}", "guessed")
    with KeeperConnection(f"{host}:{port}", "known") as keeper:
        assert keeper.parts()[0] == []


def test_one_that_is_killed_is_left_out_and_started_again_with_the_next_world(keepers: Keepers) -> None:
    first, second = told(keepers, 0), told(keepers, 1)
    assert first.keepers == second.keepers[::-1] and (first.world, first.steps) == (1, 4)
    with KeeperConnection(second.keepers[0], "known") as keeper:
        killed = keeper.parts()[1]
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(KeeperError):
            keeper.parts()
    process = keepers._processes[1]
    assert process is not None and process.wait(60) == -signal.SIGKILL
    assert told(keepers, 0).keepers == first.keepers[:1]
    keepers.begin_world([0])  # the other host is not there yet
    assert told(keepers, 0).keepers == first.keepers[:1]
    keepers.begin_world([0, 1])
    assert told(keepers, 0).world == 3 and len(told(keepers, 0).keepers) == 2


def test_it_ends_with_its_launcher(keepers: Keepers) -> None:
    process = keepers._processes[0]
    assert process is not None and process.stdin is not None
    process.stdin.close()  # as the end of the launcher does, however it comes
    assert process.wait(60) == 0
    process.stdin = None
    assert process.stdout is not None and select.select([process.stdout], [], [], 0)[0]


@pytest.mark.parametrize("text", ["", "4", "[]", '{"world": 1}', json.dumps({"world": 1, "steps": 0, "keepers": ["a:1"]})])
def test_a_variable_that_no_launcher_writes(text: str) -> None:
    if not text:
        assert NeighbourMemory.of_environment({VARIABLE: text}) is None
        return
    with pytest.raises(ValueError, match=f"{VARIABLE}=.*--memory-steps. sets it"):
        NeighbourMemory.of_environment({VARIABLE: text, SECRET: "known"})


def test_without_steps_there_are_none() -> None:
    with Keepers(2, None, "known") as none:
        none.begin_world([0, 1])
        assert none.variables(0) == {}
