"""Processes of torchrun. API: ``lightning.pytorch.plugins.environments.TorchElasticEnvironment``."""

from __future__ import annotations

import os
from typing import ClassVar

from torch_compat.plugins.environments.fixed_world import FixedWorld
from torch_compat.utilities.rank_zero import rank_zero_warn


class TorchElasticEnvironment(FixedWorld):
    """``torchrun``: ``MASTER_ADDR``, ``MASTER_PORT``, ``WORLD_SIZE``, ``RANK``, ``LOCAL_RANK``, ``GROUP_RANK``."""

    variables: ClassVar[dict[str, str]] = {
        "world_size": "WORLD_SIZE",
        "global_rank": "RANK",
        "local_rank": "LOCAL_RANK",
    }
    launcher = "torchrun"

    @property
    def main_address(self) -> str:
        if "MASTER_ADDR" not in os.environ:
            rank_zero_warn("MASTER_ADDR environment variable is not defined. Set as localhost")
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        if "MASTER_PORT" not in os.environ:
            rank_zero_warn("MASTER_PORT environment variable is not defined. Set as 12910")
            os.environ["MASTER_PORT"] = "12910"
        return int(os.environ["MASTER_PORT"])

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", 0))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_nodes > 1 and num_nodes != self.world_size():
            raise ValueError(
                f"You set `num_nodes={num_nodes}` in Lightning, but torchrun started {self.world_size()} processes "
                f"(WORLD_SIZE): here one process drives all devices of a host: torchrun --nnodes={num_nodes} --nproc-per-node=1"
            )

    @staticmethod
    def detect() -> bool:
        import torch.distributed

        return torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
