"""Stock's names in user code while a step is captured, and what a step logged afterwards, given to stock's logger connector."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from torch_compat.core.logging import LogOptions
from torch_compat.step.effects.logged import LogEntry, LogRecorder
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.scalars import HostScalar, ScalarTracer
from torch_compat.step.host.slots import ValueSlot
from torch_compat.step.outcome import StepOutcome
from torch_compat.utilities.host_arrays import host_value
from torch_compat.utilities.metric_types import is_metric
from xlatrain.bridge.patches import patched

COUNTERS = ("current_epoch", "global_step", "is_last_batch")
"""Properties of stock's Trainer that change between steps; user code that is captured gets the tracer's."""

_LOSS = "the loss of training_step"
_LOG = inspect.signature(LightningModule.log)
_FIELDS = frozenset(field.name for field in dataclasses.fields(LogOptions))
_own_log: Callable[..., None] = LightningModule.log
_own_counters = {name: inspect.getattr_static(Trainer, name).__get__ for name in COUNTERS}


def counter_readers(trainer: Trainer) -> dict[str, Callable[[], Any]]:
    """Readers of the counters of a Trainer, for whose class stand-ins may be in place."""
    return {name: functools.partial(get, trainer, Trainer) for name, get in _own_counters.items()}


@contextlib.contextmanager
def stock_stands_aside(module: LightningModule, recorder: LogRecorder, tracer: ScalarTracer) -> Iterator[None]:
    """The context of a capture: ``self.log`` is recorded, and counters of the Trainer are the tracer's."""

    @functools.wraps(_own_log)
    def log(self: LightningModule, *args: Any, **kwargs: Any) -> None:
        given = dict(_LOG.bind(self, *args, **kwargs).arguments)
        name, value = given.pop("name"), given.pop("value")
        del given["self"]
        kinds = (torch.Tensor, numbers.Number, HostScalar, HostFuture)
        if self is not module or module._fabric is not None or not (isinstance(value, kinds) or is_metric(value)):
            _own_log(self, name, value, **given)  # which says what is wrong with it
            return
        recorder.record(str(module._current_fx_name), name, value, LogOptions(**given))

    def counter(name: str) -> property:
        return property(lambda trainer: tracer.counter(name))

    def stand_in(name: str) -> property:
        plain = inspect.getattr_static(LightningModule, name).__get__

        def get(self: LightningModule) -> Any:
            found = plain(self, type(self))
            if isinstance(found, list):
                return [recorder.stand_in(one) for one in found]
            return None if found is None else recorder.stand_in(found)

        return property(get)

    with patched(
        [
            (LightningModule, "log", log),
            *((LightningModule, name, stand_in(name)) for name in ("logger", "loggers")),
            *((Trainer, name, counter(name)) for name in COUNTERS),
        ]
    ):
        yield


@contextlib.contextmanager
def entered(module: LightningModule, hook: str) -> Iterator[None]:
    """The context of a hook's call: ``self.log`` knows where it is."""
    before = module._current_fx_name
    module.__dict__["_current_fx_name"] = hook
    try:
        yield
    finally:
        module.__dict__["_current_fx_name"] = before


def note_loss(recorder: LogRecorder, loss: Any) -> None:
    """Keep the value of the loss as ``training_step`` returned it: a program's own is divided for accumulation."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        recorder.record(_LOSS, _LOSS, loss, LogOptions())


def give_logs(module: LightningModule, outcome: StepOutcome) -> torch.Tensor | None:
    """Call stock's ``log`` for each value that an executed step logged, in order. Gives the value of :func:`note_loss`.

    This reads the logged values from the devices, and so waits for the step.
    """
    loss, values = None, None
    for entry in outcome.logs:
        if values is None and not (entry.constant and entry.weight is None):
            values = host_value(outcome.packed)
        value = _value(entry, outcome, values)
        if entry.hook == _LOSS:
            loss = value
            continue
        options = {name: option for name, option in asdict_shallow(entry.options).items() if option != _DEFAULTS[name]}
        if entry.weight is not None:
            assert values is not None
            options["batch_size"] = int(values[entry.weight])
        with entered(module, entry.hook):
            _own_log(module, entry.name, value, **options)
    return loss


def _value(entry: LogEntry, outcome: StepOutcome, values: Any) -> Any:
    if isinstance(entry.value, ValueSlot):
        assert outcome.result_of is not None
        found = outcome.result_of(entry.value)  # which makes the step's calls of metrics
    elif entry.constant:
        return entry.value
    else:
        found = torch.tensor(values[entry.value].item(), dtype=entry.dtypes.step)
    return found if entry.metric is None else entry.metric


def asdict_shallow(options: LogOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _FIELDS}


_DEFAULTS = asdict(LogOptions())
