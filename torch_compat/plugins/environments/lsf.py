"""Tasks of ``jsrun``. API: ``lightning.pytorch.plugins.environments.LSFEnvironment``."""

from __future__ import annotations

import os
import socket
from typing import ClassVar

from torch_compat.plugins.environments.fixed_world import FixedWorld
from xlatrain.cluster.distributed.cluster import lsf_hosts, lsf_port


class LSFEnvironment(FixedWorld):
    """``jsrun``: ``JSM_NAMESPACE_SIZE``, ``JSM_NAMESPACE_RANK``, ``JSM_NAMESPACE_LOCAL_RANK``; ``LSB_DJOB_RANKFILE``."""

    variables: ClassVar[dict[str, str]] = {
        "world_size": "JSM_NAMESPACE_SIZE",
        "global_rank": "JSM_NAMESPACE_RANK",
        "local_rank": "JSM_NAMESPACE_LOCAL_RANK",
    }
    launcher = "jsrun"

    def __init__(self) -> None:
        """Set ``MASTER_ADDR`` and ``MASTER_PORT``, as stock does.

        Raises:
            ValueError: there is no rank file, or no job.
        """
        super().__init__()
        self._main_address, self._main_port = lsf_hosts(os.environ)[0], lsf_port(os.environ)
        os.environ.update(MASTER_ADDR=self._main_address, MASTER_PORT=str(self._main_port))

    @property
    def main_address(self) -> str:
        return self._main_address

    @property
    def main_port(self) -> int:
        return self._main_port

    @staticmethod
    def detect() -> bool:
        return {"LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"} <= os.environ.keys()

    def node_rank(self) -> int:
        """The place of this host in the rank file.

        Raises:
            ValueError: it is not there.
        """
        hosts, here = lsf_hosts(os.environ), socket.gethostname()
        if here not in hosts:
            raise ValueError(
                f"this host, {here}, is not one of LSB_DJOB_RANKFILE={os.environ['LSB_DJOB_RANKFILE']}: {', '.join(hosts)}"
            )
        return hosts.index(here)
