"""The roll call, between threads of one process: who does not come, or does not belong, is named to everybody who did."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.processes import PATIENCE_S, wait_for
from tests.roll_calls import RollCall
from xlatrain.cluster.launch import free_port
from xlatrain.cluster.watch import join, roll_call
from xlatrain.cluster.watch.roll_call import JoinError, answer_roll, call_roll


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def roll(address: str, monkeypatch: pytest.MonkeyPatch) -> RollCall:
    return RollCall(address, monkeypatch)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The result of each call, or its error, when all are made at once."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except JoinError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def test_all_meet_and_the_port_is_free_for_jax(address: str) -> None:
    def first() -> Any:
        here = call_roll(address, 3, PATIENCE_S, {"settings": {"dead_after": 7.0}})
        # What JAX's service does next: listen where the roll was called, while these connections stay open.
        listener = socket.create_server(("127.0.0.1", int(address.rsplit(":", 1)[1])))
        return here, listener

    ((here, seen_at), listener), *others = together(
        first, lambda: answer_roll(address, 1, 3, PATIENCE_S), lambda: answer_roll(address, 2, 3, PATIENCE_S)
    )
    assert sorted(here) == [1, 2]
    assert seen_at is None  # nobody came from another host
    for process, (peer, wire, welcome) in zip((1, 2), others, strict=True):
        assert (peer.process, welcome["settings"], welcome["address"], wire.address) == (0, {"dead_after": 7.0}, None, None)
        wire.send({"hello from": process})
        assert here[process][1].receive() == [{"hello from": process}]
    here[1][1].close()
    assert others[0][1].receive() is None  # an end is seen at once
    for wire in (*(wire for _, wire in here.values()), *(wire for _, wire, _ in others)):
        wire.close()
    listener.close()


def test_who_does_not_come_is_named_to_all(address: str, roll: RollCall) -> None:
    def clock() -> None:
        wait_for(lambda: roll.here == {1, 3})
        roll.pass_time(3.0)

    *outcomes, _ = together(
        lambda: call_roll(address, 5, 3.0, {}),
        lambda: answer_roll(address, 1, 5, PATIENCE_S),
        lambda: answer_roll(address, 3, 5, PATIENCE_S),
        clock,
    )
    for outcome in outcomes:
        assert isinstance(outcome, JoinError)
        assert re.match(
            r"processes 2, 4 of 5 did not come within 3 s \(XLATRAIN_JOIN_WITHIN\)\. "
            r"Here: process 0 \(host \S+, pid \d+\), process 1 \(host \S+, pid \d+\), process 3 \(host \S+, pid \d+\)\. Look",
            str(outcome),
        )


def test_process_0_that_does_not_come_is_named(address: str) -> None:
    with pytest.raises(JoinError, match=rf"process 2 \(host .*\) could not reach process 0 at {address} within 0.3 s .*refused"):
        answer_roll(address, 2, 3, 0.3)


def test_another_number_of_processes(address: str) -> None:
    outcomes = together(lambda: call_roll(address, 2, PATIENCE_S, {}), lambda: answer_roll(address, 1, 3, PATIENCE_S))
    for outcome in outcomes:
        assert re.search(r"process 1 .* was started as one of 3 processes, process 0 .* as one of 2", str(outcome))


def test_one_number_twice(address: str) -> None:
    outcomes = together(
        lambda: call_roll(address, 4, PATIENCE_S, {}), *(lambda: answer_roll(address, 1, 4, PATIENCE_S) for _ in range(2))
    )
    for outcome in outcomes:
        assert "two processes say that they are process 1: process 1 (host" in str(outcome)


def test_other_versions(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = roll_call.introduction(1, 2)
    theirs = {**mine, "versions": {**mine["versions"], "jax": "0.1"}}

    def guest() -> Any:
        wire = roll_call._reach(address, 1, time.monotonic() + PATIENCE_S, PATIENCE_S)
        wire.send(theirs)
        reply = roll_call._reply(wire, time.monotonic() + PATIENCE_S, address)
        wire.close()
        return reply["refused"]

    outcomes = together(lambda: call_roll(address, 2, PATIENCE_S, {}), guest)
    for outcome in outcomes:
        assert re.search(r"process 1 .* has other versions: jax 0.1 there, [0-9.]+ on process 0", str(outcome))


def test_strangers_are_not_heard(address: str, roll: RollCall) -> None:
    def stranger() -> bytes:
        wire = roll_call._reach(address, 1, roll.monotonic() + PATIENCE_S, PATIENCE_S)
        wire.socket.settimeout(PATIENCE_S)
        wire.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
        heard = wire.socket.recv(100)
        roll.pass_time(3.0)
        return heard

    outcome, heard = together(lambda: call_roll(address, 2, 3.0, {}), stranger)
    assert "process 1 of 2 did not come" in str(outcome)
    assert heard == b""


def test_something_else_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def other() -> None:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        _, outcome = together(other, lambda: answer_roll(address, 1, 2, PATIENCE_S))
    assert "is no process 0 that calls the roll" in str(outcome)


def test_the_watch_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_WATCH", "0")
    assert join("nowhere.invalid:1", 1, 2, 300.0) == 300.0  # nobody is called
    monkeypatch.setenv("XLATRAIN_WATCH", "off")
    with pytest.raises(ValueError, match="XLATRAIN_WATCH='off'; expected 1"):
        join("nowhere.invalid:1", 1, 2, 300.0)
