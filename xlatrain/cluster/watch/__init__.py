"""Processes of one world that look after each other: who did not come, who died, who hangs, where, and where time went.

JAX names nobody when a process does not come (it ends the others with SIGABRT), a dead one after 100 s by a number alone, and a
hanging one never. So process 0 calls the roll on the coordinator's port before JAX takes it (:mod:`.roll_call`), and the
connections stay open: over them every process tells where it is (:mod:`.progress`), a few bytes every few seconds. They are TCP
connections and not keys in JAX's key-value store because the kernel closes them as soon as a process dies, because
they work before JAX's service does, and because they outlive that service, which dies with process 0.

Who is lost is decided in :mod:`.verdict`, from facts alone. Then every process that is inside a run (:func:`armed`) prints who,
on which host, at which step, and the stacks of its own threads, and ends with :data:`LOST_PEER`: whoever started it can start all
again. One that is outside of runs goes on until its next.
"""

from __future__ import annotations

from xlatrain.cluster.watch.alarm import LOST_PEER
from xlatrain.cluster.watch.progress import Progress, progress
from xlatrain.cluster.watch.roll_call import JoinError
from xlatrain.cluster.watch.settings import WatchSettings
from xlatrain.cluster.watch.watcher import address, armed, depart, ends_with, join, start, stragglers

__all__ = [
    "LOST_PEER",
    "JoinError",
    "Progress",
    "WatchSettings",
    "address",
    "armed",
    "depart",
    "ends_with",
    "join",
    "progress",
    "start",
    "stragglers",
]
