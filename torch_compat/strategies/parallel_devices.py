"""The common part of the parallel strategies of the Trainer and of Fabric: torch's names of their devices, and their world."""

from __future__ import annotations

import torch

from torch_compat.plugins.environments.cluster_environment import ClusterEnvironment


class ParallelDevices:
    """The first base of a parallel strategy class, whose constructor sets both attributes.

    Attributes:
        cluster_environment: which world the process joins; None: what started it says.
    """

    cluster_environment: ClusterEnvironment | None
    _parallel_devices: list[torch.device] | None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """A torch device for each device of this process."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    def teardown(self) -> None:
        super().teardown()  # pyright: ignore[reportAttributeAccessIssue]  the strategy's
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
