"""The world of processes: joining it, and collectives of host objects."""

from __future__ import annotations

from xlatrain.cluster.distributed.agreement import DisagreementError, agree
from xlatrain.cluster.distributed.exits import leave
from xlatrain.cluster.distributed.objects import Channel, all_gather_object, all_processes, any_process, barrier, broadcast_object
from xlatrain.cluster.distributed.world import World, initialize, world

__all__ = [
    "World",
    "initialize",
    "world",
    "Channel",
    "all_gather_object",
    "all_processes",
    "any_process",
    "DisagreementError",
    "agree",
    "barrier",
    "broadcast_object",
    "leave",
]
