"""Logged values of one loop: what ``self.log`` gave, reduced per step and per epoch.

Values of compiled steps arrive as one packed array per step and are read in batches, late: at a logging step, at the end of an
epoch, or when somebody asks for the metrics. Until then they stay on the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torch_compat.core.logging import LogOptions, resolve, warn_of_whole_number
from torch_compat.run.batches import LoggedSize, flatten_batch
from torch_compat.step.effects.logged import SINGLE, LogEntry, LoggedDtypes, logged_dtypes
from torch_compat.step.host.slots import ValueSlot
from torch_compat.utilities.data import warn_of_ambiguous_batch
from torch_compat.utilities.device_transfer import convert_tensors_to_scalars
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.metric_types import is_metric

_SAVED = ("name", "hook", "dataloader_idx", "loader", "last", "total", "weight", "is_logged")
_SAVED_OPTIONS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
)
_READ_AHEAD = 64  # steps whose values may wait on the device; older ones are complete, so that reading them never stalls


@dataclass
class Metric:
    """A logged name: its latest value and its running reduction, or the torchmetrics object that reduces it."""

    name: str
    hook: str
    options: LogOptions
    dataloader_idx: int | None = None
    last: float | torch.Tensor | None = None
    batch: int = 0  # that gave it
    before: float | torch.Tensor | None = None  # the latest of the batches before that one
    total: float = 0.0
    weight: float = 0.0
    torchmetric: Any = None
    is_logged: bool = False  # since the last reset
    computed: float | torch.Tensor | None = None  # the epoch's value, from when somebody asks until the name is logged again
    dtypes: LoggedDtypes = SINGLE
    of_programs: bool = False  # values of it may wait on the device
    loader: int | None = None  # whose step logged it, also where its name does not say so

    def __post_init__(self) -> None:
        self._start_anew()

    def reset(self) -> None:
        """Forget the epoch's values; a torchmetrics object that was logged forgets its own."""
        self._start_anew()
        if self.torchmetric is not None:
            self.torchmetric.reset()

    def _start_anew(self) -> None:
        self.is_logged = False
        self.last = self.before = self.computed = None
        self.weight = 0.0
        self.total = {"min": math.inf, "max": -math.inf}.get(self.options.reduce_fx, 0.0)

    def update(self, value: float, batch_size: float, batch: int) -> None:
        """Add one value of a batch; a mean is weighted by the batch size."""
        self._take(value, batch)
        if not self.options.on_epoch:
            return
        reduce_fx = self.options.reduce_fx
        if reduce_fx == "mean":
            self.total += value * batch_size
        elif reduce_fx == "sum":
            self.total += value
        else:
            self.total = (min if reduce_fx == "min" else max)(self.total, value) if value == value else value
        self.weight += batch_size

    def hold(self, torchmetric: Any, value: Any, batch: int) -> None:
        """Log a torchmetrics object: its value at the step, and itself for the epoch."""
        self.torchmetric = torchmetric
        self._take(self._tensor(value) if self.options.on_step else None, batch)

    def _take(self, value: float | torch.Tensor | None, batch: int) -> None:
        self.is_logged, self.computed = True, None
        if batch != self.batch:
            self.batch, self.before = batch, self.last
        self.last = value

    def value(self, on_step: bool, until: int | None = None) -> torch.Tensor | None:
        """The value as callbacks see it: of the last step, or reduced over the epoch; None where it has none.

        Args:
            until: the last batch whose step counts; None: all do.
        """
        if not self.is_logged or not (self.options.on_step if on_step else self.options.on_epoch):
            return None
        if not on_step and self.computed is None:
            self.computed = self._reduced() if self.torchmetric is None else self._tensor(self.torchmetric.compute())
        found = self.computed
        if on_step:
            found = self.last if until is None or self.batch <= until else self.before
        if found is None or isinstance(found, torch.Tensor):
            return found
        return torch.tensor(found, dtype=self.dtypes.step if on_step else self.dtypes.epoch)

    def _reduced(self) -> float:
        if self.options.reduce_fx != "mean":
            return self.total
        return self.total / self.weight if self.weight else math.nan

    def _tensor(self, value: Any) -> torch.Tensor | None:
        """A value of the torchmetrics object; None is no value, and is not logged.

        Raises:
            ValueError: it is no tensor.
        """
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"The `.compute()` return of the metric logged as {self.name!r} must be a tensor. Found {value}, the"
                f" {type(value).__name__} that a {type(self.torchmetric).__name__} gives: a dict of values is logged by"
                " `self.log_dict(metric.compute())`"
            )
        return value.detach().cpu()  # as values that are no metric are

    def names(self, on_step: bool) -> tuple[str, str]:
        """The plain name and, where a metric is logged per step and per epoch, the name with its suffix."""
        suffix = "" if self.dataloader_idx is None else f"/dataloader_idx_{self.dataloader_idx}"
        forked = self.options.on_step and self.options.on_epoch
        end = ("_step" if on_step else "_epoch") if forked else ""
        return f"{self.name}{suffix}", f"{self.name}{end}{suffix}"


@dataclass
class Metrics:
    """Metric values by destination."""

    callback: dict[str, torch.Tensor] = field(default_factory=dict)
    logged: dict[str, torch.Tensor] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)


class Results:
    """The metrics of one loop.

    Args:
        training: the training loop's: its step values are callback metrics too.
        sync: reduces a host value over processes, ``(value, reduction) -> value``; used for values that hooks log with
            ``sync_dist=True``. A captured step needs none: it sees the global batch.
        look: called before all values of steps are read; raises where one of the steps went wrong inside its program.
    """

    def __init__(self, training: bool, sync: Callable[[float, str], float], look: Callable[[], None]) -> None:
        self._look = look
        self.training = training
        self._sync = sync
        self._metrics: dict[tuple[str, str, int | None], Metric] = {}
        self._pending: deque[_Pending] = deque()
        self._plans: dict[tuple[int, int | None], tuple[Any, Sequence[_Bound]]] = {}
        self.batch_size: LoggedSize | None = None
        self._batch: Any = None
        self._begun = self._ended = 0  # numbers of batches
        self.dataloader_idx: int | None = None

    def log(self, hook: str, name: str, value: Any, options: LogOptions) -> None:
        """Log a host value from a hook."""
        metric = self._metric(hook, name, options, logged_dtypes(value))
        if is_metric(value):
            metric.hold(value, value._forward_cache, self._begun)
            return
        if metric.of_programs:  # steps became eager: what the programs before logged comes first
            self.drain()
        warn_of_whole_number(hook, name, value)
        number = _single(name, value)
        if options.sync_dist:
            number = self._sync(number, options.reduce_fx)
        metric.update(number, self._weight(metric) if options.batch_size is None else options.batch_size, self._begun)

    def push(
        self,
        entries: Sequence[LogEntry],
        packed: Any,
        batch_size: LoggedSize,
        result_of: Callable[[ValueSlot], Any] | None = None,
        anew: Collection[int] = (),
    ) -> None:
        """Log the values of one executed step.

        Args:
            entries: of a captured step.
            packed: its packed scalars, float32[n] or float64[n].
            batch_size: of the global batch.
            result_of: gives what the step's host calls returned.
            anew: indices of entries before which their hook's values are forgotten, see :meth:`begin_hook`.
        """
        if not entries:
            return
        key = (id(entries), self.dataloader_idx)
        if key not in self._plans:
            self._plans[key] = (entries, [_Bound(self._metric(e.hook, e.name, e.options, e.dtypes), e) for e in entries])
            for one in self._plans[key][1]:
                one.metric.of_programs = True
                if one.entry.options.batch_size is None:
                    _check_size(one.metric, batch_size)
        self._pending.append(_Pending(self._plans[key][1], packed, batch_size, result_of, anew, self._begun))
        if len(self._pending) > _READ_AHEAD:
            self._read_oldest(_READ_AHEAD // 2)

    def drain(self) -> None:
        """Read everything that still waits on the device."""
        self._look()
        self._read_oldest(len(self._pending))

    def _read_oldest(self, n: int) -> None:
        for _ in range(n):
            step = self._pending.popleft()
            values = np.asarray(step.packed).tolist()
            for index, one in enumerate(step.bound):
                entry = one.entry
                if index in step.anew:
                    self._forget(entry.hook)
                value = entry.value
                if isinstance(value, ValueSlot):
                    assert step.result_of is not None
                    value = step.result_of(value)
                    if entry.metric is None:
                        one.metric.dtypes = logged_dtypes(value, entry.dtypes.step)
                elif not entry.constant:
                    value = values[int(value)]
                if entry.metric is None:
                    weight = entry.options.batch_size if entry.weight is None else values[entry.weight]
                    one.metric.update(_single(entry.name, value), step.batch_size.rows if weight is None else weight, step.batch)
                else:
                    one.metric.hold(entry.metric, value, step.batch)

    def _metric(self, hook: str, name: str, options: LogOptions, dtypes: LoggedDtypes) -> Metric:
        resolved = resolve(options, hook)
        index = self.dataloader_idx if options.add_dataloader_idx else None
        key = (hook, name, index)
        found = self._metrics.get(key)
        if found is None:
            found = self._metrics[key] = Metric(name, hook, resolved, index, dtypes=dtypes, loader=self.dataloader_idx)
        elif found.loader != self.dataloader_idx:
            raise MisconfigurationException(
                f"You called `self.log({name}, ...)` twice in `{hook}` with different arguments: without `add_dataloader_idx`, "
                f"for the dataloaders {found.loader} and {self.dataloader_idx}. Log it under different names, or leave "
                "`add_dataloader_idx` out"
            )
        elif _what_must_agree(found.options) != _what_must_agree(resolved):
            raise MisconfigurationException(
                f"You called `self.log({name}, ...)` twice in `{hook}` with different arguments: {found.options}, then {resolved}"
            )
        return found

    def begin_batch(self, batch: Any) -> None:
        """Count values that hooks log to ``batch``, this process's rows, until its step tells its size; None: to no batch."""
        self.batch_size = None
        self._batch = batch
        self._begun += 1

    def end_batch(self) -> None:
        """The batch's last hook is done."""
        self._ended = self._begun

    def _weight(self, metric: Metric) -> int:
        """The weight in the epoch's mean of a value that a hook logs."""
        if not metric.options.on_epoch:
            return 1
        if self.batch_size is None:
            if self._batch is None:
                return 1
            leaves, spec = flatten_batch(self._batch)
            self.batch_size = LoggedSize.of([leaf.shape for leaf in leaves], spec)
        _check_size(metric, self.batch_size)
        return self.batch_size.rows

    def begin_hook(self, hook: str) -> None:
        """Forget what ``hook`` has logged: numbers, not torchmetrics objects."""
        if any(step.logs(hook) for step in self._pending):
            self.drain()
        self._forget(hook)

    def _forget(self, hook: str) -> None:
        for metric in self._metrics.values():
            if metric.hook == hook and metric.dataloader_idx is None and metric.torchmetric is None:
                metric.reset()

    def torchmetrics(self) -> list[Any]:
        """The torchmetrics objects that were logged since the last reset, and those inside them, which are reset with them."""
        logged = [metric.torchmetric for metric in self._metrics.values() if metric.torchmetric is not None and metric.is_logged]
        return [part for one in logged for part in one.modules() if is_metric(part)]

    def state_dict(self, module: torch.nn.Module) -> list[dict[str, Any]]:
        """The values logged in this epoch; torchmetrics objects by their names in ``module``."""
        self.drain()
        names = {id(one): name for name, one in module.named_modules()}
        return [
            {
                **{name: getattr(metric, name) for name in _SAVED},
                "options": {name: getattr(metric.options, name) for name in _SAVED_OPTIONS},
                "dtypes": tuple(metric.dtypes),
                "torchmetric": names.get(id(metric.torchmetric)),
            }
            for metric in self._metrics.values()
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], module: torch.nn.Module) -> None:
        """Continue the epoch in which :meth:`state_dict` was taken."""
        for one in state:
            options = LogOptions(**one["options"])
            dtypes = LoggedDtypes(*one["dtypes"])
            metric = Metric(one["name"], one["hook"], options, one["dataloader_idx"], dtypes=dtypes)
            for name in _SAVED:
                setattr(metric, name, one[name])
            metric.torchmetric = None if one["torchmetric"] is None else module.get_submodule(one["torchmetric"])
            self._metrics[metric.hook, metric.name, metric.dataloader_idx] = metric

    def metrics(self, on_step: bool, *, ended: bool = False) -> Metrics:
        """Current values of the current loader: of the last step, or reduced over the epoch.

        Args:
            ended: of the last step whose batch has ended; what a batch logged in which something was raised is not among them.

        Raises:
            ValueError: a metric's value is no tensor, or one of several elements that is to be shown on the progress bar.
        """
        self.drain()
        found, until = Metrics(), self._ended if ended else None
        for metric in self._metrics.values():
            if metric.loader != self.dataloader_idx or (value := metric.value(on_step, until)) is None:
                continue
            name, forked = metric.names(on_step)
            if metric.options.logger is not False:
                found.logged[forked] = value
            if self.training or (metric.options.on_epoch and not on_step):
                found.callback[name] = value
                found.callback[forked] = value
            if metric.options.prog_bar:
                found.progress_bar[forked] = convert_tensors_to_scalars(value)
        return found

    def logs_steps(self) -> bool:
        """Whether anything is logged per step."""
        return any(metric.options.on_step for metric in self._metrics.values())

    def reset(self) -> None:
        """The epoch is over: its values are forgotten, and torchmetrics objects that were logged start anew."""
        self._pending.clear()
        for metric in self._metrics.values():
            if metric.is_logged:
                metric.reset()


@dataclass(frozen=True)
class _Bound:
    metric: Metric
    entry: LogEntry


@dataclass(frozen=True)
class _Pending:
    """The values of a step that nobody has read: arguments of :meth:`Results.push`, and the number of its batch."""

    bound: Sequence[_Bound]
    packed: Any
    batch_size: LoggedSize
    result_of: Callable[[ValueSlot], Any] | None
    anew: Collection[int]
    batch: int

    def logs(self, hook: str) -> bool:
        """Whether values of ``hook`` are among them."""
        return any(one.metric.hook == hook for one in self.bound)


def _check_size(metric: Metric, size: LoggedSize) -> None:
    """Warn of a batch whose size is ambiguous, where it is the weight of a value.

    Raises:
        MisconfigurationException: all tensors are in objects of a class of which nothing is known.
    """
    if metric.options.on_epoch and metric.options.reduce_fx == "mean" and metric.torchmetric is None:
        if size.is_hidden:
            raise MisconfigurationException(
                "We could not infer the batch_size from the batch: its tensors are in objects of a class that is no container "
                "and no dataclass. Say it with `self.log(..., batch_size=...)`, by which epoch means are weighted."
            )
        if size.is_ambiguous:
            warn_of_ambiguous_batch(size.rows)


def _single(name: str, value: Any) -> float:
    """A logged value as a number.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, torch.Tensor) or not hasattr(value, "__float__"):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f": {value!r}"
        found = f"{type(value).__name__}{shape}"
        raise ValueError(
            f"The `.compute()` return of the metric logged as {name!r} must be a tensor with a single number. Found {found}"
        )
    return float(value)


def _what_must_agree(options: LogOptions) -> tuple[Any, ...]:
    where = (options.prog_bar, options.logger is not False, options.metric_attribute, options.add_dataloader_idx)
    how = (options.on_step, options.on_epoch, options.reduce_fx, options.enable_graph, options.rank_zero_only)
    return where + how
