"""The verdict which process is lost: decided from what the processes told, and when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xlatrain.cluster.watch.progress import COMPILING
from xlatrain.cluster.watch.wire import Message

GRACE_S = 1.0
"""From a process's end until the others end too: whoever started them may be about to end them itself."""


THE_END = "the end of the script"
"""The call in which a process waits for others that has nothing else to do."""

AT_ODDS_S = 10.0
"""How long all processes wait in different calls before they are told: a call that all have made takes milliseconds."""

NO_WORD = "ended without a word (killed, or out of memory?)"


_NUMBER = (int, float)
HELLO: dict[str, type | tuple[type, ...]] = {"process": int, "count": int, "host": str, "pid": int, "versions": dict}
"""What a process says of itself when the roll is called."""

BEAT: dict[str, type | tuple[type, ...]] = {
    "marks": int,
    "step": int,
    "phase": str,
    "waiting": (str, type(None)),
    "waits_s": _NUMBER,
    "idle_s": _NUMBER,
    "armed": bool,
    "hang_after": _NUMBER,
}
"""What it says later, of where it is."""


def is_well_formed(message: object, fields: Mapping[str, type | tuple[type, ...]]) -> bool:
    """Whether a message has the fields, each of its type; a truth value is no number."""
    return isinstance(message, dict) and all(
        name in message
        and isinstance(message[name], kind)
        and (kind is bool or not isinstance(message[name], bool))
        and not (isinstance(message[name], float) and not math.isfinite(message[name]))
        for name, kind in fields.items()
    )


@dataclass
class Peer:
    """A process as another process, or itself, knows it.

    Attributes:
        process, host, pid: who it is.
        seen: when it last gave a sign of life.
        marks, step, phase, idle_s: its :class:`~xlatrain.cluster.watch.progress.Progress` then.
        waiting, waits_s: the collective call in which its main thread waits for others, and for how long.
        is_armed: it is inside a run.
        hang_after: what that run says.
        ended: when its end was noticed: it said so, or is gone.
        is_gone: its connection is closed.
        how: how it ended, in words; None for an end that went well.
    """

    process: int
    host: str
    pid: int
    seen: float
    marks: int = 0
    step: int = 0
    phase: str = "starting"
    idle_s: float = 0.0
    waiting: str | None = None
    waits_s: float = 0.0
    is_armed: bool = False
    hang_after: float = 0.0
    ended: float | None = None
    is_gone: bool = False
    how: str | None = field(default=None)

    @classmethod
    def of_hello(cls, hello: Message, now: float) -> Peer:
        return cls(hello["process"], hello["host"], hello["pid"], now)

    def __str__(self) -> str:
        return f"process {self.process} (host {self.host}, pid {self.pid})"

    @property
    def grace_s(self) -> float:
        """Seconds from its end until the others end too. With process 0 JAX's service is gone, and JAX ends the others soon."""
        return 0.0 if self.process == 0 and self.how == NO_WORD else GRACE_S

    def note_beat(self, beat: Message, now: float) -> None:
        """A sign of life came."""
        self.seen = now
        self.marks, self.step, self.phase = beat["marks"], beat["step"], beat["phase"]
        self.waiting, self.waits_s = beat["waiting"], beat["waits_s"]
        self.idle_s, self.is_armed, self.hang_after = beat["idle_s"], beat["armed"], beat["hang_after"]

    def end(self, how: str | None, now: float) -> None:
        """Note the end of the process; the first notice counts."""
        if self.ended is None:
            self.ended, self.how = now, how


def lost(peers: Sequence[Peer], now: float, dead_after: float, *, hangs: bool = True) -> str | None:
    """The lost processes and why, as the text that every process prints; None while all is well.

    Args:
        peers: all processes, or those that one knows of.
        now: on the clock of ``Peer.seen``.
        dead_after: seconds.
        hangs: whether to look for one that does not get on, too.
    """
    dead = [
        f"{peer} {peer.how}, last heard of at step {peer.step} ({peer.phase})"
        for peer in peers
        if peer.ended is not None and peer.how is not None and now - peer.ended >= peer.grace_s
    ]
    dead += [
        f"{peer} has given no sign of life for {now - peer.seen:.0f} s, since step {peer.step} ({peer.phase})"
        for peer in peers
        if peer.ended is None and now - peer.seen > dead_after
    ]
    if dead or not hangs:
        return "; ".join(dead) or None
    return _at_odds(peers) or _hanging(peers)


def _at_odds(peers: Sequence[Peer]) -> str | None:
    """The verdict where all processes wait for each other, but not in the same call, so that none will ever get on; else None."""
    if len({peer.waiting for peer in peers}) == 1 or any(peer.ended is not None for peer in peers):
        return None
    limits = [min(AT_ODDS_S, peer.hang_after / 2) for peer in peers if peer.is_armed]
    if not limits or min(limits) == 0 or any(peer.waits_s < max(limits) for peer in peers):
        return None
    calls: dict[str | None, list[Peer]] = {}
    for peer in peers:
        calls.setdefault(peer.waiting, []).append(peer)
    found = "; ".join(f"{_people(group)} in {call!r} (step {group[0].step})" for call, group in calls.items())
    return f"processes wait for each other in different calls, which all must make: {found} (is one under is_global_zero?)"


def _hanging(peers: Sequence[Peer]) -> str | None:
    stuck = [peer for peer in peers if peer.ended is None and peer.is_armed and 0 < peer.hang_after <= peer.idle_s]
    if not stuck or any(peer.phase == COMPILING for peer in peers if peer.ended is None):
        return None  # compiling may take long, and the others wait for it
    if gone := [str(peer) for peer in peers if peer.ended is not None]:
        return f"{_people(stuck)} cannot go on: {', '.join(gone)} ended before, as if all were done"
    behind = absent(peers)
    if len(behind) < len(peers):
        if any(peer in stuck for peer in behind) or not any(peer.is_armed for peer in behind):
            others = _people(peer for peer in peers if peer not in behind)
            return "; ".join(f"{peer} hangs: {_where(peer)}" for peer in behind) + f"; waiting for it: {others}"
        return None  # the one behind has moved lately: slow, not stuck
    return f"no process has got on for {max(peer.idle_s for peer in stuck):.0f} s: {'; '.join(f'{p} {_where(p)}' for p in peers)}"


def absent(peers: Sequence[Peer]) -> list[Peer]:
    """The processes that have not come to where the others are; all where nothing tells them apart.

    They have passed fewer marks; or as many, and the others wait in a collective call of hosts, and they do not.
    """
    least = min(peer.marks for peer in peers)
    behind = [peer for peer in peers if peer.marks == least]
    elsewhere = [peer for peer in behind if peer.waiting is None]
    return elsewhere if elsewhere and len(behind) == len(peers) else behind


def slow(peers: Sequence[Peer], after: float) -> tuple[list[Peer], str] | None:
    """The processes that the others have waited for ``after`` seconds, and a text that says so; None while there are none.

    One that compiles, or saves, for long is among them: it is named, and nothing is ended.
    """
    here = [peer for peer in peers if peer.ended is None]
    at_end = [peer for peer in peers if peer.ended is not None or peer.waiting == THE_END]
    if after == 0 or any(peer.how is not None for peer in at_end) or any(not p.is_armed for p in here if p not in at_end):
        return None
    if not here or min(peer.idle_s for peer in here) < after:
        return None
    behind = absent(here)
    if len(behind) == len(peers):
        return None
    calls: dict[str | None, list[Peer]] = {}
    for peer in peers:
        if peer not in behind:
            calls.setdefault(THE_END if peer in at_end else peer.waiting, []).append(peer)
    waiting = "; ".join(f"{_people(group)}" + (f" in {call!r}" if call is not None else "") for call, group in calls.items())
    return behind, "; ".join(f"{peer} keeps the others waiting: {_where(peer)}" for peer in behind) + f"; they are {waiting}"


def _where(peer: Peer) -> str:
    call = "" if peer.waiting is None else f", in {peer.waiting!r}"
    return f"{peer.idle_s:.0f} s at step {peer.step} ({peer.phase}{call})"


def _people(peers: Iterable[Any]) -> str:
    """A few names, and how many more."""
    names = [str(peer) for peer in peers]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
