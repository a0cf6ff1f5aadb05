"""Agreement of processes on what they are about to do, found out before a collective starts."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Mapping, Sequence

from xlatrain.cluster.distributed.objects import Channel
from xlatrain.cluster.distributed.world import world

_SHOWN = 8

_channel = Channel("agreement")


class DisagreementError(RuntimeError):
    """Processes are about to run different programs: each would wait for the others in another collective, for ever."""


def agree(what: str, facts: Mapping[str, str], advice: str) -> None:
    """Compare facts between all processes; collective, but of hosts only. With one process it does nothing.

    Only a digest is exchanged as long as the facts are the same.

    Args:
        what: what they are about to do, for the error.
        facts: name → value; both are shown where they differ.
        advice: what to do about it.

    Raises:
        DisagreementError: on every process: names the processes that differ from the majority (of a tie, from process 0's side).
        TimeoutError: a process did not come.
    """
    if world().process_count == 1:
        return
    digests = _channel.all_gather(hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everywhere = _channel.all_gather(dict(facts))
    told = [line for name in dict.fromkeys(n for one in everywhere for n in one) if (line := _difference(name, everywhere))]
    more = f" (and {len(told) - _SHOWN} more)" if len(told) > _SHOWN else ""
    raise DisagreementError(f"processes disagree about {what}: {'; '.join(told[:_SHOWN])}{more}; {advice}")


def _difference(name: str, everywhere: Sequence[Mapping[str, str]]) -> str:
    values = [one.get(name, "absent") for one in everywhere]
    usual, _ = collections.Counter(values).most_common(1)[0]  # of several, the one that came first
    odd: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        if value != usual:
            odd.setdefault(value, []).append(process)
    return "; ".join(
        f"{name} is {value} on process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}, {usual} elsewhere"
        for value, processes in odd.items()
    )
