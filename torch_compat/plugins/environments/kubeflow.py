"""Processes of Kubeflow's PyTorchJob. API: ``lightning.pytorch.plugins.environments.KubeflowEnvironment``."""

from __future__ import annotations

import os
from typing import ClassVar

from torch_compat.plugins.environments.fixed_world import FixedWorld
from torch_compat.plugins.environments.torchelastic import TorchElasticEnvironment


class KubeflowEnvironment(FixedWorld):
    """Kubeflow, with a process per pod: ``MASTER_ADDR``, ``MASTER_PORT``, ``WORLD_SIZE``, ``RANK``."""

    variables: ClassVar[dict[str, str]] = {"world_size": "WORLD_SIZE", "global_rank": "RANK", "node_rank": "RANK"}
    launcher = "a PyTorchJob of Kubeflow's"

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        raise NotImplementedError(
            "The Kubeflow environment can't be detected automatically: its variables are others' too. Pass it in plugins=[…]."
        )

    def local_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if TorchElasticEnvironment.detect():
            raise ValueError("these processes were started by torchrun: use TorchElasticEnvironment, or no environment")
