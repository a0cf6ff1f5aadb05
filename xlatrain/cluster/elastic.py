"""A pod on this machine that goes on when processes are lost: with fewer, from the newest checkpoint, until they come back.

JAX cannot take a process out of a world, or into one, while programs run over all of its devices (docs/design/0040-elastic.md).
So the processes that are left are started again as a smaller world; a process that may come back is taken in by asking all to
save where they are (SIGTERM, as at a preemption) and starting the larger world from there. ``XLATRAIN_ELASTIC`` tells the scripts
how many processes there would be: the global batch stays that of all of them, whatever the world is.

With ``memory_steps`` each host has a keeper beside its process, so that a run goes on from its neighbours' memory, and not from
storage (:mod:`xlatrain.cluster.keepers`).
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from xlatrain.cluster.keepers import Keepers
from xlatrain.cluster.launch import (
    ELASTIC,
    POLL_S,
    RESUME_SINCE,
    SECRET,
    Child,
    Guardian,
    Printer,
    Signals,
    child_environment,
    free_port,
    stop,
)

SAVE_S = 600.0
"""How long a world may take to save before one that comes back is taken in; then it is killed, and goes on from what it has."""

_SHORT_S = 30.0
_SHORT_STARTS = 5  # worlds in a row that lose somebody so soon: it is no host that fails, but the script


@dataclass
class _End:
    """The end of a world.

    Attributes:
        status: as of the launch.
        lost: slots whose process was killed, or did not end.
        interrupted: a signal to the launcher ended it.
        grows: it was asked to save, for one that comes back.
    """

    status: int = 0
    lost: list[int] = field(default_factory=list)
    interrupted: bool = False
    grows: bool = False


def launch_elastic(
    command: Sequence[str],
    least: int,
    most: int,
    devices_per_process: int = 1,
    *,
    rejoin_after: float = 60.0,
    may_rejoin: Callable[[int], bool] = lambda _: True,
    coordinator_port: int | None = None,
    grace_s: float = 10.0,
    max_restarts: int = 0,
    memory_steps: int | None = None,
    environment: Mapping[str, str] | None = None,
    output: IO[Any] | None = None,
) -> int:
    """Run ``command`` as ``most`` processes of one world, and go on with ``least`` or more where some are lost.

    A process is lost that a signal ended (SIGKILL, out of memory, a crash), or that others gave up and that does not end when it
    is asked to. One that exits with a status has failed: all are started again ``max_restarts`` times, as by
    :func:`xlatrain.cluster.launch.launch`.

    Args:
        command, devices_per_process, coordinator_port, grace_s, max_restarts, environment, output: as of ``launch``.
        least: processes with which it goes on; with fewer it waits for some to come back.
        most: processes that it begins with.
        rejoin_after: seconds after which one that was lost is started again,
        may_rejoin: if this says so of its number: whether what it needs is there.
        memory_steps: how many optimizer steps may be lost with a process: the state is kept in the memory of two hosts that
            often. None: what was not saved is lost.

    Returns:
        The exit status, as of ``launch``.

    Raises:
        ValueError: not ``1 <= least <= most``, or another number out of its range.
    """
    _check(least, most, devices_per_process, max_restarts, rejoin_after, memory_steps)
    base = dict(os.environ if environment is None else environment)
    base.setdefault(RESUME_SINCE, str(int(time.time())))
    base.setdefault(SECRET, secrets.token_hex(16))
    base[ELASTIC] = str(most)
    printer = Printer(sys.stdout if output is None else output, most)
    away = _Away(may_rejoin)
    restarts = short = 0
    newest = "newest checkpoint" if memory_steps is None else "newest snapshot in memory, or checkpoint"
    with Signals() as signals, Keepers(most, memory_steps, base[SECRET]) as keepers:
        while True:
            if received := _wait_for(least, most, away, signals):
                return 128 + received
            absent = away.slots()
            slots = [slot for slot in range(most) if slot not in absent]
            away.keep(absent)
            keepers.begin_world(slots)
            port, started = coordinator_port or free_port(), time.monotonic()
            children: list[Child] = []
            with Guardian() as guardian:
                try:
                    for process, slot in enumerate(slots):
                        known = base | keepers.variables(slot)
                        own = child_environment(known, process, len(slots), devices_per_process, port)
                        children.append(Child(slot, command, own, printer))
                        guardian.watch(children[-1].group)
                    end = _watch(children, signals, printer, grace_s, away)
                finally:
                    for child in children:
                        child.kill()
                    for child in children:
                        child.finish()
            if end.status == 0 or end.interrupted:
                return end.status
            if end.lost:
                short = short + 1 if time.monotonic() - started < _SHORT_S else 0
                if short == _SHORT_STARTS:
                    printer.say(f"{short} worlds in a row lost a process within {_SHORT_S:g} s: giving up")
                    return end.status
                away.add(end.lost, time.monotonic() + rejoin_after)
                left = most - len(away.slots())
                wait = "" if left >= least else f", fewer than {least}: waiting until some come back"
                printer.say(f"lost {end.lost}; going on with {left} of {most} processes from the {newest}{wait}")
            elif end.grows:
                printer.say("starting again with those that come back")
            else:
                if restarts == max_restarts:
                    return end.status
                restarts += 1
                printer.say(f"starting again ({restarts} of {max_restarts})")


def _check(least: int, most: int, devices: int, max_restarts: int, rejoin_after: float, memory_steps: int | None) -> None:
    if not 1 <= least <= most:
        raise ValueError(f"elastic: at least 1 process, and no fewer at most, not {least}:{most}")
    if devices < 1 or max_restarts < 0 or not rejoin_after >= 0:
        raise ValueError(
            f"devices_per_process must be at least 1, max_restarts and rejoin_after at least 0, not {devices}, {max_restarts}, "
            f"{rejoin_after}"
        )
    if memory_steps is not None and (memory_steps < 1 or most < 2):
        raise ValueError(
            f"memory_steps={memory_steps} with {most} process(es) at most: expected at least 1 step, and 2 processes, which "
            "are neighbours"
        )


def _wait_for(least: int, most: int, away: _Away, signals: Signals) -> int:
    """Wait until so many may run. Returns the number of a signal that came meanwhile, or 0."""
    while most - len(away.slots()) < least:
        if received := signals.take():
            return received[0]
        time.sleep(POLL_S)
    return 0


class _Away:
    """The slots whose process is lost, each with the time from which it may be started again."""

    def __init__(self, may_rejoin: Callable[[int], bool]) -> None:
        self._may_rejoin = may_rejoin
        self._back_at: dict[int, float] = {}

    def add(self, slots: Sequence[int], back_at: float) -> None:
        self._back_at |= dict.fromkeys(slots, back_at)

    def keep(self, slots: set[int]) -> None:
        """The others have been started again."""
        self._back_at = {slot: at for slot, at in self._back_at.items() if slot in slots}

    def slots(self) -> set[int]:
        """Slots that may not be started again yet."""
        now = time.monotonic()
        return {slot for slot, at in self._back_at.items() if at > now or not self._may_rejoin(slot)}

    def come_back(self) -> list[int]:
        """All slots, where each may be started again; else none."""
        return [] if self.slots() else sorted(self._back_at)


def _watch(children: Sequence[Child], signals: Signals, printer: Printer, grace_s: float, away: _Away) -> _End:
    """Wait until every child has ended, or the world must not go on."""
    end, deadline = _End(), float("inf")
    while running := [child for child in children if child.poll() is None]:
        failed = [child for child in children if child.poll()]
        if failed and end.status == 0 and not end.grows:
            first = failed[0]
            end.status = first.status()
            end.lost = [child.index for child in failed if child.was_killed()]
            printer.say(f"process {first.index} {first.how_it_ended()}; stopping the others")
            deadline = stop(running, signal.SIGTERM, grace_s)
        for number in signals.take():
            printer.say(f"passing {signal.Signals(number).name} on to {len(running)} processes")
            end.interrupted, end.status = True, end.status or 128 + number
            deadline = stop(running, number, grace_s)
        if end == _End() and (back := away.come_back()):
            printer.say(f"process(es) {back} may come back: the others save, to go on together")
            end.grows = True
            deadline = stop(running, signal.SIGTERM, SAVE_S)
        if time.monotonic() > deadline:
            printer.say(f"processes {[child.index for child in running]} did not end in time; killing them")
            if end.status and not end.lost and not end.interrupted:
                end.lost = [child.index for child in running]  # the others have given them up
            break
        time.sleep(POLL_S)
    statuses = [child.status() for child in children if child.poll() is not None]
    end.status = end.status or next((status for status in statuses if status), 0)
    if end.status and not end.grows and not end.lost and not end.interrupted:
        end.lost = [child.index for child in children if child.poll() is not None and child.was_killed()]
    return end
