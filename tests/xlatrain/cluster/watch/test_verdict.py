"""Who is lost, from what the processes told."""

from __future__ import annotations

from typing import Any

import pytest

from xlatrain.cluster.watch.progress import COMPILING
from xlatrain.cluster.watch.settings import WatchSettings, seconds
from xlatrain.cluster.watch.verdict import NO_WORD, THE_END, Peer, lost, slow

NOW = 1000.0


def peer(process: int, **facts: Any) -> Peer:
    given = {"seen": NOW, "marks": 10, "step": 4, "phase": "in its step", "is_armed": True, "hang_after": 60.0} | facts
    return Peer(process, f"host{process}", 100 + process, **given)


def test_all_is_well() -> None:
    assert lost([peer(0), peer(1, marks=9, idle_s=59), peer(2, seen=NOW - 29)], NOW, 30) is None


def test_silence() -> None:
    found = lost([peer(0), peer(1, seen=NOW - 31)], NOW, 30)
    assert found == "process 1 (host host1, pid 101) has given no sign of life for 31 s, since step 4 (in its step)"


def test_an_end_is_named_after_a_grace() -> None:
    assert lost([peer(0), peer(1, ended=NOW - 0.5, how=NO_WORD)], NOW, 30) is None
    found = lost([peer(0), peer(1, ended=NOW - 1.5, how=NO_WORD)], NOW, 30)
    assert found == f"process 1 (host host1, pid 101) {NO_WORD}, last heard of at step 4 (in its step)"
    assert lost([peer(0, ended=NOW, how=NO_WORD)], NOW, 30, hangs=False) is not None  # JAX is about to end all


def test_an_end_that_went_well_is_none() -> None:
    assert lost([peer(0), peer(1, ended=NOW - 99, seen=NOW - 99)], NOW, 30) is None


def test_the_one_that_is_behind_hangs() -> None:
    others = [peer(0, idle_s=70, marks=12), peer(2, idle_s=70, marks=12)]
    found = lost([others[0], peer(1, idle_s=71), others[1]], NOW, 30)
    assert found is not None
    assert found.startswith("process 1 (host host1, pid 101) hangs: 71 s at step 4 (in its step); waiting for it: process 0")
    assert "process 2 (host host2" in found
    assert lost([others[0], peer(1, idle_s=3), others[1]], NOW, 30) is None  # slow, not stuck


def test_of_processes_as_far_as_each_other_the_one_that_is_in_no_call_of_all_hangs() -> None:
    waiting = {"waiting": "batch 4 of the data", "waits_s": 70.0, "idle_s": 70.0}
    found = lost([peer(0, **waiting), peer(1, idle_s=71), peer(2, **waiting)], NOW, 30)
    assert found is not None
    assert found.startswith("process 1 (host host1, pid 101) hangs: 71 s at step 4 (in its step); waiting for it: process 0")


def test_one_that_keeps_the_others_waiting_is_named_long_before_anybody_is_ended() -> None:
    waiting = {"waiting": "batch 4 of the data", "waits_s": 46.0, "idle_s": 46.0}
    late = peer(1, idle_s=47, phase=COMPILING)
    found = slow([peer(0, **waiting), late], 45)
    assert found is not None and found[0] == [late]
    assert found[1] == (
        "process 1 (host host1, pid 101) keeps the others waiting: 47 s at step 4 (compiling); they are process 0 (host host0, "
        "pid 100) in 'batch 4 of the data'"
    )
    assert slow([peer(0, **waiting), late], 0) is None  # not asked for
    assert slow([peer(0, **waiting), peer(1, idle_s=44)], 45) is None  # it has moved since
    assert slow([peer(0, idle_s=46, phase=COMPILING), late], 45) is None  # nothing tells them apart
    assert slow([peer(0, **waiting), peer(1, idle_s=47, ended=NOW, how=NO_WORD)], 45) is None  # that is said anyway
    found = slow([late, peer(0, ended=NOW)], 45)
    assert found is not None and found[1].endswith("they are process 0 (host host0, pid 100) in 'the end of the script'")
    ended = peer(0, waiting=THE_END, is_armed=False, idle_s=50, marks=30)
    assert slow([ended, late], 45) is not None


def test_one_outside_of_the_run_that_the_others_are_in() -> None:
    found = lost([peer(0, idle_s=70, marks=12), peer(1, marks=0, is_armed=False, hang_after=0.0, idle_s=80)], NOW, 30)
    assert found is not None
    assert found.startswith("process 1 (host host1, pid 101) hangs: 80 s")


def test_a_compilation_may_take_long() -> None:
    assert lost([peer(0, idle_s=70, marks=12), peer(1, idle_s=71, phase=COMPILING)], NOW, 30) is None


def test_all_stand_still_at_the_same_place() -> None:
    found = lost([peer(0, idle_s=61), peer(1, idle_s=62)], NOW, 30)
    assert found is not None
    assert found.startswith("no process has got on for 62 s: process 0")
    assert lost([peer(0, idle_s=61, hang_after=0.0), peer(1, idle_s=62, hang_after=0.0)], NOW, 30) is None


def test_the_others_wait_for_one_that_has_finished() -> None:
    found = lost([peer(0, idle_s=61), peer(1, ended=NOW - 50)], NOW, 30)
    assert found is not None
    assert "process 0 (host host0, pid 100) cannot go on: process 1 (host host1, pid 101) ended before" in found


def test_all_wait_for_all_in_different_calls() -> None:
    reads, steps = {"waiting": "reading 'w'", "waits_s": 11.0}, {"waiting": "batches/0, call 5", "waits_s": 12.0}
    found = lost([peer(0, **reads), peer(1, **steps), peer(2, **steps)], NOW, 30)
    assert found == (
        "processes wait for each other in different calls, which all must make: process 0 (host host0, pid 100) in "
        "\"reading 'w'\" (step 4); process 1 (host host1, pid 101), process 2 (host host2, pid 102) in 'batches/0, call 5' "
        "(step 4) (is one under is_global_zero?)"
    )
    assert lost([peer(0, **reads), peer(1, **steps | {"waits_s": 9.0})], NOW, 30) is None  # may be late
    assert lost([peer(0, **reads), peer(1)], NOW, 30) is None  # is on its way
    assert lost([peer(0, **reads), peer(1, **steps), peer(2, ended=NOW)], NOW, 30) is None
    assert lost([peer(n, **steps) for n in range(2)], NOW, 30) is None
    assert lost([peer(0, **reads, hang_after=0.0), peer(1, **steps, hang_after=0.0)], NOW, 30) is None


def test_settings() -> None:
    assert WatchSettings.of_environment({}) == WatchSettings(60.0, None, 45.0)
    assert WatchSettings.of_environment({"XLATRAIN_DEAD_AFTER": "10", "XLATRAIN_HANG_AFTER": "0"}) == WatchSettings(10.0, 0.0)
    with pytest.raises(ValueError, match=r"XLATRAIN_DEAD_AFTER='soon'; expected a number of seconds, at least 0\.5"):
        seconds("XLATRAIN_DEAD_AFTER", {"XLATRAIN_DEAD_AFTER": "soon"})
    assert WatchSettings().beat(8) == 1.0
    assert WatchSettings().beat(1000) == 5.0
    assert WatchSettings(dead_after=1.0).beat(1000) == 0.2
