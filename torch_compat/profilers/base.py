"""``PassThroughProfiler``: records nothing."""

from __future__ import annotations

from torch_compat.profilers.profiler import Profiler


class PassThroughProfiler(Profiler):
    """The Trainer's default: actions are not recorded, and cost nothing.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.profilers.PassThroughProfiler.html
    """

    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass
