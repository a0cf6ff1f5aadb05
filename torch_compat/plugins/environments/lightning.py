"""Processes on hosts of the user's own. API: ``lightning.pytorch.plugins.environments.LightningEnvironment``."""

from __future__ import annotations

import os

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.utilities.rank_zero import rank_zero_only
from xlatrain.cluster.launch import free_port


class LightningEnvironment(ClusterEnvironment):
    """Reads ``MASTER_ADDR``, ``MASTER_PORT``, ``NODE_RANK`` (or ``GROUP_RANK``), ``LOCAL_RANK``.

    Without ``LOCAL_RANK`` nobody has started processes: the world is this one, or those that ``DDPSpawnStrategy`` starts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._main_port = -1
        self._global_rank = 0
        self._world_size = 1

    @property
    def creates_processes_externally(self) -> bool:
        return "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        if self._main_port == -1:
            self._main_port = int(os.environ["MASTER_PORT"]) if "MASTER_PORT" in os.environ else find_free_network_port()
        return self._main_port

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return self._world_size

    def set_world_size(self, size: int) -> None:
        self._world_size = size

    def global_rank(self) -> int:
        return self._global_rank

    def set_global_rank(self, rank: int) -> None:
        self._global_rank = rank
        rank_zero_only.rank = rank

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))

    def node_rank(self) -> int:
        return int(os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", 0)))

    def teardown(self) -> None:
        os.environ.pop("WORLD_SIZE", None)


def find_free_network_port() -> int:
    """A port on which nothing listens, or ``STANDALONE_PORT``. Another process may take it before it is used."""
    return int(os.environ["STANDALONE_PORT"]) if "STANDALONE_PORT" in os.environ else free_port()
