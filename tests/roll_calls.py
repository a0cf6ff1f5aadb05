"""A roll call under a test's control: whom process 0 has heard, and a clock that stands still until it is set forward."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import pytest

from tests.processes import PATIENCE_S
from xlatrain.cluster.watch import roll_call


def is_called(address: str) -> bool:
    """Whether somebody listens at the address: a stranger calls there, and hangs up."""
    host, port = address.rsplit(":", 1)
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), PATIENCE_S):
        return True
    return False


class RollCall:
    """The roll that is called at an address, in a thread of this process.

    Attributes:
        here: processes that process 0 has entered.
        dropped: messages of strangers that it has heard.

    Args:
        address: ``host:port``.
        monkeypatch: puts the clock into the roll call's place for the time of the test.
    """

    def __init__(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._address = address
        self._now = time.monotonic()
        self.here: set[int] = set()
        self.dropped = 0
        hear = roll_call._Roll.hear

        def noted(roll: Any, wire: Any) -> bool:
            stays = hear(roll, wire)
            self.here, self.dropped = set(roll.here), roll.dropped
            return stays

        monkeypatch.setattr(roll_call._Roll, "hear", noted)
        monkeypatch.setattr(roll_call, "time", self)

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """As long as the machine's own clock says: it is a pause between two tries."""
        time.sleep(seconds)

    def pass_time(self, seconds: float) -> None:
        """Set the clock forward, and have process 0 look at it."""
        self._now += seconds
        is_called(self._address)
