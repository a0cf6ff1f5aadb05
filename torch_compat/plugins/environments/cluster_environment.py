"""The interface of cluster environments. API: ``lightning.fabric.plugins.environments.ClusterEnvironment``."""

from __future__ import annotations

from abc import ABC, abstractmethod


class ClusterEnvironment(ABC):
    """Says how many processes there are, which of them this is, and where process 0 listens.

    Given as ``Trainer(plugins=[…])`` or ``Strategy(cluster_environment=…)`` it decides which world the process joins, before
    what ``xlatrain launch``, torchrun or SLURM say. A process drives all devices of its host (or of its ``local_rank``), so
    that its ranks are those of *processes*.
    """

    @property
    @abstractmethod
    def creates_processes_externally(self) -> bool:
        """Whether a launcher starts the processes. On a mesh it must be True, unless ``DDPSpawnStrategy`` starts them."""

    @property
    @abstractmethod
    def main_address(self) -> str:
        """The host of process 0."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """The port on which process 0 listens."""

    @staticmethod
    @abstractmethod
    def detect() -> bool:
        """Whether this process was started by it."""

    @abstractmethod
    def world_size(self) -> int:
        """The number of processes."""

    @abstractmethod
    def set_world_size(self, size: int) -> None:
        """Told by the strategy, where the environment does not know."""

    @abstractmethod
    def global_rank(self) -> int:
        """The index of this process."""

    @abstractmethod
    def set_global_rank(self, rank: int) -> None:
        """Told by the strategy, where the environment does not know."""

    @abstractmethod
    def local_rank(self) -> int:
        """The index of this process on its host."""

    @abstractmethod
    def node_rank(self) -> int:
        """The index of this host."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:  # noqa: B027
        """Raise where the Trainer's ``devices`` and ``num_nodes`` contradict what was started."""

    def teardown(self) -> None:  # noqa: B027
        """Called at the end of a run."""
