"""Environments whose variables say everything."""

from __future__ import annotations

import logging
import os
from typing import ClassVar

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment


class MissingVariableError(KeyError, ValueError, RuntimeError):
    """A variable that a launcher sets is not there, or is no number: a ``KeyError`` or ``ValueError``, as in stock."""

    def __str__(self) -> str:
        return str(self.args[0])


def say_ignored(environment: ClusterEnvironment, method: str, what: str) -> None:
    """Log, as stock does, that the strategy cannot set what is given from outside."""
    module = type(environment).__module__.rpartition(".")[2]
    logging.getLogger(f"lightning.fabric.plugins.environments.{module}").debug(
        f"{type(environment).__name__}.{method} was called, but setting {what} is not allowed. Ignored."
    )


class FixedWorld(ClusterEnvironment):
    """A world whose size and ranks are environment variables, set by the launcher of the process.

    Attributes:
        variables: for ``world_size``, ``global_rank``, ``local_rank`` and ``node_rank`` the variable's name.
        launcher: the command that sets them.
    """

    variables: ClassVar[dict[str, str]]
    launcher: ClassVar[str]

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._read("world_size")

    def set_world_size(self, size: int) -> None:
        say_ignored(self, "set_world_size", "world size")

    def global_rank(self) -> int:
        return self._read("global_rank")

    def set_global_rank(self, rank: int) -> None:
        say_ignored(self, "set_global_rank", "global rank")

    def local_rank(self) -> int:
        return self._read("local_rank")

    def node_rank(self) -> int:
        return self._read("node_rank")

    def _read(self, what: str) -> int:
        """An environment variable.

        Raises:
            MissingVariableError: it is not there.
        """
        name = self.variables[what]
        value = os.environ.get(name, "")
        if not value.isdecimal():
            found = "not found" if name not in os.environ else f"is {value!r}"
            raise MissingVariableError(
                f"Cannot determine {what.replace('_', ' ')}. Environment variable `{name}` {found}. Start the processes with"
                f" {self.launcher}, or leave {type(self).__name__} out: the launcher of this process is found without it."
            )
        return int(value)
