"""Processes of ``mpirun``. API: ``lightning.pytorch.plugins.environments.MPIEnvironment``."""

from __future__ import annotations

import functools
import importlib.util
import socket
from typing import Any

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.plugins.environments.fixed_world import say_ignored
from xlatrain.cluster.launch import free_port


class MPIEnvironment(ClusterEnvironment):
    """Ranks of ``MPI.COMM_WORLD``; needs ``mpi4py``.

    Raises:
        ModuleNotFoundError: mpi4py is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("mpi4py") is None:
            raise ModuleNotFoundError("MPIEnvironment needs mpi4py: pip install mpi4py")
        from mpi4py import MPI  # pyright: ignore[reportMissingImports]

        self._world: Any = MPI.COMM_WORLD

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @functools.cached_property
    def _main(self) -> tuple[str, int]:
        return self._world.bcast((socket.gethostname(), free_port()), root=0)

    @property
    def main_address(self) -> str:
        return self._main[0]

    @property
    def main_port(self) -> int:
        return self._main[1]

    @staticmethod
    def detect() -> bool:
        if importlib.util.find_spec("mpi4py") is None:
            return False
        from mpi4py import MPI  # pyright: ignore[reportMissingImports]

        return MPI.COMM_WORLD.Get_size() > 1

    def world_size(self) -> int:
        return self._world.Get_size()

    def set_world_size(self, size: int) -> None:
        say_ignored(self, "set_world_size", "world size")

    def global_rank(self) -> int:
        return self._world.Get_rank()

    def set_global_rank(self, rank: int) -> None:
        say_ignored(self, "set_global_rank", "global rank")

    @functools.cached_property
    def _hosts(self) -> list[str]:
        return self._world.allgather(socket.gethostname())

    def local_rank(self) -> int:
        return self._hosts[: self.global_rank()].count(socket.gethostname())

    def node_rank(self) -> int:
        return sorted(set(self._hosts)).index(socket.gethostname())
