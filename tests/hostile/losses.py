"""An elastic run of eight processes that loses processes and hosts at random, gets them back, and ends as if nothing had been.

Its processes are forks of one that has made the imports: what the launcher starts is a program of the standard library that asks
for a fork, tells it what signals come, and ends as it does.
"""

from __future__ import annotations

import collections
import io
import json
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.multiprocess.elastic_runs import SCRIPT, check, rejoining, undisturbed
from tests.multiprocess.pod import environment
from tests.processes import PATIENCE_S
from tests.warm import OURS, Server
from xlatrain.cluster.elastic import launch_elastic
from xlatrain.cluster.watch.goodput import goodput
from xlatrain.cluster.watch.ledger import read

PROCESSES, LEAST = 8, 4
ROWS, EPOCHS = 150, 4
MEMORY_STEPS = 2

CLIENT = """
import json, os, signal, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
line.sendall(json.dumps({"command": sys.argv[2:], "environment": dict(os.environ), "pid": os.getpid()}).encode() + b"\\n")
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda received, _: line.sendall(b"%d\\n" % received))
status = int(line.makefile().readline() or 70)
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class Forks:
    """Starts programs for clients that connect to a socket; a context manager.

    Attributes:
        path: of the socket.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "forks"
        self._server = Server(OURS, environment())
        self._lock = threading.Lock()  # of the server's pipe
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)

    def __enter__(self) -> Forks:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with self._lock:
            self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            lines = client.makefile("rb")
            asked: dict[str, Any] = json.loads(lines.readline())
            with self._lock:
                output = Path(f"/proc/{asked['pid']}/fd/1")  # the pipe that the launcher reads
                child = self._server.start(asked["command"], asked["environment"], output)
            threading.Thread(target=self._pass_on, args=(lines, child), daemon=True).start()
            while self._poll(child) is None:
                threading.Event().wait(0.05)
            try:
                client.sendall(b"%d\n" % child.returncode)
            except OSError:  # the launcher has killed the client
                return

    def _pass_on(self, lines: Any, child: Any) -> None:
        """Signals that come to the client; its own end is a SIGKILL."""
        for line in lines:
            with self._lock:
                child.send_signal(int(line))
        with self._lock:
            child.kill()

    def _poll(self, child: Any) -> int | None:
        with self._lock:
            return child.poll()


def run(folder: Path, seed: int, losses: int) -> collections.Counter[str]:
    """One run with so many losses, compared with the undisturbed one: how many there were of what, and what they cost."""
    disturbed, ledger, output = folder / "disturbed", folder / "ledger", io.StringIO()
    disturbed.mkdir()
    undisturbed(folder / "undisturbed", PROCESSES, ROWS, EPOCHS)
    with Forks(folder) as forks:
        client = [sys.executable, "-I", "-S", "-c", CLIENT, str(forks.path)]
        script = [str(SCRIPT), str(disturbed), str(ROWS), str(EPOCHS), str(seed), str(losses)]
        status = launch_elastic(
            [*client, *script], LEAST, PROCESSES, rejoin_after=0, may_rejoin=lambda _: rejoining(disturbed),
            memory_steps=MEMORY_STEPS, grace_s=PATIENCE_S,
            environment=environment() | {"XLATRAIN_LEDGER": str(ledger)}, output=output,
        )  # fmt: skip
    said = output.getvalue()
    assert status == 0, f"seed {seed}: {said}"
    check(disturbed, folder / "undisturbed", ROWS, EPOCHS)
    account = goodput(read(ledger))
    assert account is not None
    lost = collections.Counter(f"lost a {path.name.rpartition('.')[2]}" for path in disturbed.glob("lost.*"))
    returned = sum(after > before for before, after in (loss.processes for loss in account.losses))
    from_memory = len({line.partition("continuing from")[2] for line in said.splitlines() if "no storage is read" in line})
    steps = max((loss.lost_steps for loss in account.losses), default=0)
    assert steps <= MEMORY_STEPS, f"seed {seed}: {account.losses}: {said}"
    found = {"worlds that took some in": returned, "continued from memory": from_memory, "steps done twice": account.lost_steps}
    return lost + collections.Counter(found)


def drill(_: Path, first: int, count: int) -> collections.Counter[str]:
    """A run with so many losses; ``first`` is its seed."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), first, count)
