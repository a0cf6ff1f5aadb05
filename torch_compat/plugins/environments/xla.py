"""Hosts of a TPU pod. API: ``lightning.pytorch.plugins.environments.XLAEnvironment``."""

from __future__ import annotations

import functools
from typing import Any

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.environments.fixed_world import say_ignored
from xlatrain.cluster.distributed import cluster


class XLAEnvironment(ClusterEnvironment):
    """The world as the launcher, or else the TPU runtime, describes it: a process on each host, with all chips of the host.

    Stock's, over torch_xla, counts a process for each chip.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            raise TypeError(f"XLAEnvironment takes no arguments here, found {[*args, *kwargs]}: JAX finds the hosts of a pod")

    @functools.cached_property
    def _place(self) -> cluster.ProcessPlace:
        return cluster.detect()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return (self._place.coordinator_address or "127.0.0.1:0").rpartition(":")[0]

    @property
    def main_port(self) -> int:
        return int((self._place.coordinator_address or "127.0.0.1:0").rpartition(":")[2])

    @staticmethod
    def detect() -> bool:
        """Whether the TPU runtime describes a pod of several hosts."""
        return "Tpu" in cluster.detect().source

    def world_size(self) -> int:
        return self._place.process_count

    def set_world_size(self, size: int) -> None:
        say_ignored(self, "set_world_size", "world size")

    def global_rank(self) -> int:
        return self._place.process_id

    def set_global_rank(self, rank: int) -> None:
        say_ignored(self, "set_global_rank", "global rank")

    def local_rank(self) -> int:
        return self._place.local_process_id

    def node_rank(self) -> int:
        return self._place.process_id
