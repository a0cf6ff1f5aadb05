"""The state of a stream that was saved on another number of processes than read it now.

Each process had a stream of its own. How these are to be read by fewer or more processes only the owner of the state knows, which
says it by a method :attr:`RESHARD`; where it does not, the run is refused rather than continued with other samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.cluster.distributed import world

RESHARD = "reshard_state_dicts"
"""``reshard_state_dicts(states, process_index, process_count)``: the state with which this process of so many continues what
processes with these states, in order, would have read; the next global batch is to have the same samples."""


@dataclass(frozen=True)
class OfProcesses:
    """The states of one loader on all processes that saved it, in their order."""

    states: Sequence[Any]


class NotMovable(Exception):
    """The saved states cannot be continued: raised by :attr:`RESHARD` with the reason, for the error that names the loader."""


def state_here(saved: Any, owner: Any, *, name: str, kind: str, between: bool) -> Any:
    """The state for this process.

    Args:
        saved: of one process, which is taken as it is, or :class:`OfProcesses`.
        owner: whose state it is.
        name, kind: of the loader, for messages.
        between: whether the loader is between two passes.

    Raises:
        MisconfigurationException: the owner cannot say what it is.
    """
    if not isinstance(saved, OfProcesses):
        return saved
    here, states = world(), list(saved.states)
    reshard = getattr(owner, RESHARD, None)
    reason = "each process read a stream of its own, which no other process can continue"
    if callable(reshard):
        try:
            return reshard(states, here.process_id, here.process_count)
        except NotMovable as error:
            reason = str(error)
    elif between and all(state == states[0] for state in states):
        rank_zero_warn(
            f"{name}: `{kind}` had the same state on all {len(states)} processes between two passes, and begins with it on "
            f"{here.process_count}. If the state counts what a process has read of its own part, give it "
            f"`{RESHARD}(states, process_index, process_count)`."
        )
        return states[0]
    raise MisconfigurationException(
        f"{name}: the checkpoint has the state of `{kind}` on {len(states)} processes, and this run has {here.process_count}: "
        f"{reason}. Resume on {len(states)} processes; or give the object with that `state_dict()` a method "
        f"`{RESHARD}(states, process_index, process_count)` that returns this process's; or use a map-style dataset or a "
        "grain.MapDataset of batches, whose order does not depend on the processes"
    )
