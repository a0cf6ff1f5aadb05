"""The ``self.log`` calls of a captured step: a plan that is carried out with real values after each executed step.

The way of a logged value from the capture to the results of a loop:

1. In the capture :meth:`LogRecorder.record` makes a :class:`LogEntry`. A tensor becomes one of the packed scalars, of which
   the entry has the position; a number is a constant in the entry; for the result of a host call it has a slot.
2. ``CapturedStep.logs`` keeps the entries, and ``CapturedStep.gradient_function`` packs the scalars into one output.
3. After each run ``MeshStepRunner._outcome`` puts entries and packed scalars into a ``StepOutcome``; nothing is read.
4. ``FitLoop.take_logs``, or the evaluation loop, pushes them to ``Results`` (``trainer/results.py``), where they wait.
5. ``Results.drain`` reads packed scalars when metrics are asked for, or 64 steps later: each updates its metric on the host.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_compat.core.logging import LogOptions, resolve, warn_of_whole_number
from torch_compat.step.effects.recorded_object import RecordedObject
from torch_compat.step.host.calls import HostCalls
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.scalars import HostScalar
from torch_compat.step.host.slots import ValueSlot
from torch_compat.step.metrics.calls import MetricCalls
from torch_compat.utilities.metric_types import is_metric
from xlatrain.bridge.errors import CaptureError, user_line

if TYPE_CHECKING:
    from torchmetrics import Metric


class LoggedDtypes(NamedTuple):
    """The dtypes of a metric: of the value of a step, and of the value that an epoch is reduced to."""

    step: torch.dtype = torch.float32
    epoch: torch.dtype = torch.float32


SINGLE = LoggedDtypes()


@dataclass(frozen=True)
class LogEntry:
    """A logged scalar of a captured step.

    Attributes:
        hook: the step or hook that logged it (``"training_step"``).
        name: the metric's name as the user gave it.
        options: how it is reduced and where it goes.
        value: the position in the step's packed scalars; or the slot among the results of host calls; or a number that the
            capture found constant.
        constant: whether ``value`` is such a number.
        metric: the torchmetrics object that was logged, whose value at the step is ``value``.
        dtypes: the metric's dtypes, see :func:`logged_dtypes`; the least ones where ``value`` is a slot.
        weight: the position of ``self.log(batch_size=…)`` among the packed scalars, where that is a value of the step.
    """

    hook: str
    name: str
    options: LogOptions
    value: int | float | ValueSlot
    constant: bool = False
    metric: Metric | None = field(default=None, compare=False)
    dtypes: LoggedDtypes = SINGLE
    weight: int | None = None


def logged_dtypes(value: Any, least: torch.dtype | None = None) -> LoggedDtypes:
    """The dtypes of a logged value as a metric: at least ``least``; a step's value has its own if it can.

    Args:
        least: None: the default dtype, but at least float32.
    """
    if least is None:
        least = torch.promote_types(torch.get_default_dtype(), torch.float32)
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64):
        return LoggedDtypes(value.dtype, torch.promote_types(value.dtype, least))
    return LoggedDtypes(least, least)


@dataclass
class LogRecorder:
    """Collects ``self.log`` calls while a step is captured.

    Attributes:
        calls: the host calls of the same capture.
        on_host: numbers that the host can compute are no outputs of the step.
    """

    calls: HostCalls
    metrics: MetricCalls
    entries: list[LogEntry] = field(default_factory=list)
    scalars: list[torch.Tensor] = field(default_factory=list)
    on_host: bool = False

    def record(self, hook: str, name: str, value: Any, options: LogOptions) -> None:
        """Note one value; tensors become outputs of the step.

        Raises:
            ValueError: a tensor of more than one element.
        """
        logged, of_python = value, type(value) in (HostScalar, HostFuture)
        if type(value) is HostScalar:
            value = value.tensor()
        weight = self._weight(options.batch_size)
        if weight is not None:
            options = replace(options, batch_size=None)
        metric = None
        if is_metric(value):
            metric, value = value, self.metrics.step_value(value, used=bool(resolve(options, hook).on_step))
        if type(value) is HostFuture:
            if value.is_wide() or (traced := value.tensor(made=self.on_host)) is None:
                of_call = LogEntry(hook, name, options, value.slot(), metric=metric, dtypes=logged_dtypes(0.0), weight=weight)
                self.entries.append(of_call)
                return
            value = traced
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(f"self.log({name!r}, …) needs a single number, but got a tensor of shape {tuple(value.shape)}")
            if type(logged) is not HostScalar:
                warn_of_whole_number(hook, name, value)
            dtypes = logged_dtypes(0.0 if of_python else value)
            self.entries.append(LogEntry(hook, name, options, self.add(value), dtypes=dtypes, weight=weight))
        else:
            dtypes = logged_dtypes(value)
            self.entries.append(LogEntry(hook, name, options, float(value), constant=True, dtypes=dtypes, weight=weight))

    def _weight(self, batch_size: Any) -> int | None:
        """The position of ``batch_size`` in the packed scalars, if it may be another in the next step; else None."""
        if type(batch_size) is HostScalar:
            return self.add(batch_size.tensor())
        if type(batch_size) is HostFuture:
            batch_size = batch_size.tensor()  # None: a host call's result, of which the device knows nothing
            if batch_size is None:
                raise CaptureError(
                    f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: self.log(batch_size=…) is the "
                    "result of a call on the host.\n  Fix: give it a number or a tensor of the batch."
                )
        return self.add(batch_size) if isinstance(batch_size, torch.Tensor) else None

    def stand_in(self, logger: Any) -> Any:
        """The stand-in that the step gets for a logger."""
        return RecordedObject(self.calls, logger)

    def add(self, value: torch.Tensor) -> int:
        """Make ``value`` one of the step's packed scalars."""
        self.scalars.append(value.detach().clone().reshape(()))  # its value now: it may be changed in place later
        return len(self.scalars) - 1

    def fingerprint(self) -> tuple[Any, ...]:
        """The entries, which must be the same in every capture of the step."""
        return tuple((entry, id(entry.metric)) for entry in self.entries)  # metrics of one class look alike
