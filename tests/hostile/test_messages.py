"""The roll call and the watch among strangers: what is not of the launch is dropped and counted, and changes nothing."""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.hostile.messages import BEAT, HELLO, messages
from tests.processes import PATIENCE_S, wait_for
from tests.roll_calls import RollCall, is_called
from xlatrain.cluster.launch import ASKED_FOR, SECRET, free_port, launch
from xlatrain.cluster.watch import roll_call
from xlatrain.cluster.watch.roll_call import JoinError, _Roll, answer_roll, call_roll, introduction
from xlatrain.cluster.watch.settings import WatchSettings
from xlatrain.cluster.watch.verdict import Peer
from xlatrain.cluster.watch.watcher import Watcher
from xlatrain.cluster.watch.wire import NotOurs, Wire

MESSAGES = 10_000


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SECRET, "of this launch")
    return "of this launch"


class Line:
    """A connection within this process, from a stranger to us."""

    def __init__(self, listener: socket.socket) -> None:
        self.stranger = socket.create_connection(listener.getsockname())
        self.ours = Wire(listener.accept()[0])

    def say(self, text: bytes) -> None:
        """Sent whole and heard, whatever its length."""
        threading.Thread(target=self._send, args=(text,)).start()

    def _send(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # they have hung up
            self.stranger.sendall(text)
        self.stranger.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


@pytest.mark.parametrize("secret", [None, "of this launch"])
def test_a_roll_hears_ten_thousand_strangers(listener: socket.socket, secret: str | None) -> None:
    roll = _Roll(introduction(0, 2), secret)
    for text in messages(seed=1, count=MESSAGES // 10):
        line = Line(listener)
        if secret is not None:
            line.ours.prove(secret, "challenge", asks=True)
        line.say(text)
        while roll.hear(line.ours):
            pass
        line.ours.close()
    assert roll.here == {} and roll.dropped > MESSAGES // 20


def test_a_watch_hears_ten_thousand_messages(listener: socket.socket) -> None:
    """After the roll was called: on one connection that stays, messages that no process sends."""
    line = Line(listener)
    peer = Peer.of_hello({**HELLO}, time.monotonic())
    me = Peer.of_hello(introduction(0, 2), time.monotonic())
    watcher = Watcher(me, {1: (peer, line.ours)}, WatchSettings(), sys.exit, lambda: False)
    text = b"".join(one if one.endswith(b"\n") else one + b"\n" for one in messages(seed=2, count=MESSAGES))
    line.say(text)
    while watcher._hear(1, time.monotonic()):
        assert watcher._verdict is None  # process 1 has none to give
        assert isinstance(peer.step, int) and isinstance(peer.phase, str) and isinstance(peer.idle_s, int | float)
    assert line.ours.dropped > MESSAGES / 3
    line.ours.close()


def test_all_meet_among_strangers(address: str, known: str) -> None:
    """Strangers call all the while, some of them as a process of the launch; the launch meets, and nobody else is in it."""
    over, noisy = threading.Event(), threading.Event()

    def strangers(seed: int) -> None:
        port = int(address.rsplit(":", 1)[1])
        wait_for(lambda: is_called(address))
        for number, text in enumerate(messages(seed, MESSAGES)):
            if over.is_set():
                return
            if number == MESSAGES // 100:
                noisy.set()
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as connection:
                    connection.sendall(text)
                    spoofed = Wire(connection)
                    spoofed.send({**introduction(1, 3), "host": "spoofed"})
            except OSError:
                continue

    def call_and_serve() -> Any:
        here, _ = call_roll(address, 3, PATIENCE_S, {"settings": {}})
        service = socket.create_server(("127.0.0.1", int(address.rsplit(":", 1)[1])))  # JAX's service, to the others
        # As JAX's does, it takes every call: strangers would fill its queue, and nobody of the launch would get through.
        threading.Thread(target=take_calls, args=(service,), daemon=True).start()
        return here, service

    def take_calls(service: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed, at the end of the test
            while True:
                service.accept()[0].close()

    def late(process: int) -> Any:
        assert noisy.wait(PATIENCE_S)
        return answer_roll(address, process, 3, PATIENCE_S)

    with ThreadPoolExecutor(5) as pool:
        noise = [pool.submit(strangers, seed) for seed in range(2)]
        first = pool.submit(call_and_serve)
        others = [pool.submit(late, process) for process in (1, 2)]
        try:
            here, service = first.result()
            welcomes = [other.result() for other in others]
        finally:
            over.set()
        for one in noise:
            one.result()
        service.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        service.close()
    assert {process: peer.host for process, (peer, _) in here.items()} == dict.fromkeys((1, 2), socket.gethostname())
    for wire in (*(wire for _, wire in here.values()), *(wire for _, wire, _ in welcomes)):
        wire.close()


def test_who_does_not_know_the_secret_does_not_come(address: str, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    roll = RollCall(address, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call_roll, address, 2, 4.0, {})
        wait_for(lambda: is_called(address))  # it knows its secret
        monkeypatch.setenv(SECRET, "of another")
        other = pool.submit(answer_roll, address, 1, 2, 3.0)
        wait_for(lambda: roll.dropped)
        roll.pass_time(4.0)
        with pytest.raises(JoinError, match=r"process 1 of 2 did not come .*; \d+ messages that are none of this run's were"):
            first.result()
        with pytest.raises(JoinError, match=r"does not answer|could not reach"):
            other.result()


@pytest.mark.usefixtures("known")
def test_a_first_process_that_asks_for_no_proof_is_not_believed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "_CHALLENGE_S", 0.5)
    other = socket.create_server(("127.0.0.1", int(address.rsplit(":", 1)[1])))
    with other, pytest.raises(JoinError, match="does not ask for the proof of XLATRAIN_SECRET"):
        answer_roll(address, 1, 2, 5.0)


def test_a_proof_counts_once_in_its_place_and_direction(listener: socket.socket) -> None:
    connection = socket.create_connection(listener.getsockname())
    ours, theirs = Wire(listener.accept()[0]), Wire(connection)
    ours.prove("s", "c", asks=True)
    theirs.prove("s", "c", asks=False)
    theirs.send(BEAT)
    sent = ours.socket.recv(1 << 16, socket.MSG_PEEK)
    assert ours.receive() == [BEAT]
    for forged in (sent, sent.replace(b"training", b"draining"), sent[64:]):
        theirs.socket.sendall(forged)
        with pytest.raises(NotOurs, match="no proof of the secret"):
            ours.receive()
    ours.socket.sendall(sent)
    with pytest.raises(NotOurs):
        theirs.receive()
    ours.close()
    theirs.close()


def test_a_local_launch_listens_to_this_host_alone() -> None:
    assert roll_call.listening_address("127.0.0.1:5") == "127.0.0.1:5"
    assert roll_call.listening_address("localhost:5") == "localhost:5"
    assert roll_call.listening_address("pod-0.pods:5") == "[::]:5"


def test_every_launch_has_a_secret_that_no_command_line_shows(tmp_path: Any) -> None:
    program = f"import os, sys; open(sys.argv[1] + os.environ['XLATRAIN_PROCESS_ID'], 'w').write(os.environ[{SECRET!r}])"
    environment = {name: value for name, value in os.environ.items() if name != SECRET}
    found = collections.Counter()
    for number in range(2):
        command = [sys.executable, "-S", "-c", program, str(tmp_path / f"{number}-")]
        assert launch(command, 2, environment=environment, output=open(os.devnull, "w")) == 0  # noqa: SIM115
        first, second = ((tmp_path / f"{number}-{process}").read_text() for process in range(2))
        assert first == second and len(first) == 32
        found[first] += 1
    assert len(found) == 2


def test_the_far_end_of_ssh_is_told_the_secret() -> None:
    show = [sys.executable, "-S", "-c", f"import os; print(os.environ[{SECRET!r}])"]
    command = [sys.executable, "-m", "xlatrain.cluster.remote_child", *show]
    environment = {**os.environ, SECRET: ASKED_FOR}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdin is not None and relay.stdout is not None
        relay.stdin.write("told\n")
        relay.stdin.flush()
        assert relay.stdout.readline() == "told\n"
