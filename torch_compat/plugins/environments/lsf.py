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

    @property
    def main_address(self) -> str:
        return lsf_hosts(os.environ)[0]

    @property
    def main_port(self) -> int:
        return lsf_port(os.environ)

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
                f"this host, {here}, is none of LSB_DJOB_RANKFILE={os.environ['LSB_DJOB_RANKFILE']}: {', '.join(hosts)}"
            )
        return hosts.index(here)
