"""Meeting points of processes."""

from __future__ import annotations

import pytest

from xlatrain.checkpoint.agreement import Rendezvous
from xlatrain.checkpoint.errors import CheckpointError


def test_nobody_meets_after_a_failure():
    """A second thread (Orbax's writer) that came late waited for ever, and kept the process from ending."""
    rendezvous = Rendezvous()
    rendezvous.meet()
    rendezvous.fail("the disk is full")
    with pytest.raises(CheckpointError, match="the disk is full"):
        rendezvous.meet()
    rendezvous.fail("again")  # no error: the others know
