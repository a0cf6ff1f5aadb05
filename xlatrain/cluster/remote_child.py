"""The far end of ``xlatrain launch --hosts``: runs one command, and ends it when the launcher says so or the connection is lost.

``python -m xlatrain.cluster.remote_child command…``. Each line of standard input is the number of a signal for the command and
what it has started; the end of standard input ends them: SIGTERM, then SIGKILL. ssh itself passes no signals on, and leaves
behind what it started. Where ``XLATRAIN_SECRET`` is ``-``, the first line is the secret of the launch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from xlatrain.cluster.launch import ASKED_FOR, SECRET

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL when the launcher is gone."""


def main(command: Sequence[str]) -> int:
    """Run ``command``; returns its exit status, 128 + the signal if one ended it."""
    if os.environ.get(SECRET) == ASKED_FOR:
        os.environ[SECRET] = sys.stdin.readline().strip()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    ended = threading.Event()
    threading.Thread(target=_listen, args=(child.pid, ended), daemon=True).start()
    code = child.wait()
    ended.set()
    _signal(child.pid, signal.SIGKILL)  # processes that the child has left behind
    return 128 - code if code < 0 else code


def _listen(group: int, ended: threading.Event) -> None:
    for line in sys.stdin:
        _signal(group, int(line))
    _signal(group, signal.SIGTERM)
    if not ended.wait(GRACE_S):
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a thread may be reading standard input, whose lock the interpreter would wait for
