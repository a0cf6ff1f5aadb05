"""Values that ``self.log`` gets in a step whose values are not computed yet: fetched when somebody asks, not in the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_compat.core.logging import LogOptions, resolve
from torch_compat.step.effects.logged import LogEntry, logged_dtypes
from torch_compat.utilities.metric_types import is_metric

if TYPE_CHECKING:
    from torchmetrics import Metric


class Packed:
    """The logged values of one step; ``np.asarray`` reads them.

    Args:
        device: those that are on the device, 1-d.
        host: all, with nan where the value is on the device.
        positions: of the values on the device.
    """

    def __init__(self, device: torch.Tensor | None, host: list[float], positions: list[int]) -> None:
        self._device, self._host, self._positions = device, host, positions

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        values = np.asarray(self._host, np.float64)
        if self._device is not None:
            values[self._positions] = self._device.cpu().double().numpy()
        return values if dtype is None else values.astype(dtype)


@dataclass
class StepLog:
    """Takes the place of the results while a step runs, see :class:`torch_compat.step.effects.logged.LogRecorder`."""

    entries: list[LogEntry] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def record(self, hook: str, name: str, value: Any, options: LogOptions) -> None:
        """Note one value.

        Raises:
            ValueError: a tensor of more than one element.
        """
        metric: Metric | None = None
        if is_metric(value):
            metric, value = value, value._forward_cache if resolve(options, hook).on_step else None
            value = 0.0 if value is None else value  # not used: at the epoch's end the metric itself is computed
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"self.log({name!r}, …) needs a single number, but got a tensor of shape {tuple(value.shape)}")
            kept: Any = value.detach().clone().reshape(())  # its value now: it may be changed in place later
        else:
            kept = float(value)
        self.entries.append(LogEntry(hook, name, options, len(self.values), metric=metric, dtypes=logged_dtypes(value)))
        self.values.append(kept)

    def stand_in(self, logger: Any) -> Any:
        """Loggers are called in the step, as without a recorder."""
        return logger

    def packed(self, like: torch.device) -> Packed:
        """The values; those on the device are put together there, in the step."""
        positions = [i for i, value in enumerate(self.values) if isinstance(value, torch.Tensor)]
        host = [float("nan") if isinstance(value, torch.Tensor) else value for value in self.values]
        if not positions:
            return Packed(None, host, positions)
        wide = torch.float64 if any(self.values[i].dtype == torch.float64 for i in positions) else torch.float32
        return Packed(torch.stack([self.values[i].to(like, wide) for i in positions]), host, positions)
