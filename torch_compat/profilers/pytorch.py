"""``PyTorchProfiler``: refused by name."""

from __future__ import annotations

from typing import Any

from torch_compat.profilers.profiler import Profiler
from torch_compat.utilities.exceptions import MisconfigurationException


class PyTorchProfiler(Profiler):
    """PyTorchProfiler; not supported: PyTorch runs a compiled step's operators once, in its capture; what runs then is XLA's.

    Raises:
        MisconfigurationException: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MisconfigurationException(
            "profiler='pytorch' (PyTorchProfiler) is not supported: steps are XLA programs, in which torch.profiler sees no"
            " operator. Use profiler='xla' for what the devices do (XProf and Perfetto traces), 'simple' for the times of hooks"
            " and steps, or 'advanced' for the host's Python."
        )

    def start(self, action_name: str) -> None:
        raise NotImplementedError

    def stop(self, action_name: str) -> None:
        raise NotImplementedError
