"""Environments whose variables say everything."""

from __future__ import annotations

import logging
import os
from typing import ClassVar

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment
from torch_compat.utilities.rank_zero import LOGGER_NAME

log = logging.getLogger(f"{LOGGER_NAME}.plugins.environments.fixed_world")


class FixedWorld(ClusterEnvironment):
    """A world whose size and ranks are environment variables, set by the launcher of the process.

    Attributes:
        variables: for ``world_size``, ``global_rank``, ``local_rank`` and ``node_rank`` the variable's name.
    """

    variables: ClassVar[dict[str, str]]

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._read("world_size")

    def set_world_size(self, size: int) -> None:
        log.debug("%s: the world size is given from outside", type(self).__name__)

    def global_rank(self) -> int:
        return self._read("global_rank")

    def set_global_rank(self, rank: int) -> None:
        log.debug("%s: the rank is given from outside", type(self).__name__)

    def local_rank(self) -> int:
        return self._read("local_rank")

    def node_rank(self) -> int:
        return self._read("node_rank")

    def _read(self, what: str) -> int:
        name = self.variables[what]
        value = os.environ.get(name, "")
        if not value.isdecimal():
            raise RuntimeError(f"{type(self).__name__}: {name} must be the {what.replace('_', ' ')}, but it is {value!r}")
        return int(value)
