"""Reports of a Fabric: loggers, callbacks, the console."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.utilities.device_transfer import convert_tensors_to_scalars
from torch_compat.utilities.external_callbacks import external_callbacks
from torch_compat.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.fabric.model import MeshModel
    from torch_compat.loggers.logger import Logger


class Reports:
    """The part of Fabric that logs, prints and calls callbacks; in a compiled step these happen after it, with real values."""

    _model: MeshModel
    local_rank: int

    def __init__(self, callbacks: list[Any] | Any | None, loggers: Any) -> None:
        self._callbacks: list[Any] = [] if callbacks is None else callbacks if isinstance(callbacks, list) else [callbacks]
        self._callbacks.extend(external_callbacks("lightning.fabric.callbacks_factory"))
        self._loggers: list[Logger] = [] if loggers is None else list(loggers) if isinstance(loggers, list | tuple) else [loggers]

    @property
    def loggers(self) -> list[Logger]:
        """The loggers."""
        return self._loggers

    @property
    def logger(self) -> Logger:
        """The first logger.

        Raises:
            IndexError: there is none.
        """
        return self._loggers[0]

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Sends a number, or a tensor with one element, to all loggers."""
        self.log_dict(metrics={name: value}, step=step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Sends several numbers to all loggers.

        Raises:
            ValueError: a tensor with more than one element.
        """
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ValueError(f"The metric {name!r} has {value.numel()} elements; log a single number")
        self._on_host(self._log_dict, "fabric.log", dict(metrics), step)

    def _log_dict(self, metrics: Mapping[str, Any], step: int | None) -> None:
        numbers = convert_tensors_to_scalars(metrics)
        for logger in self._loggers:
            logger.log_metrics(metrics=numbers, step=step)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the first process of each host."""
        if self.local_rank == 0:
            self._on_host(print, "fabric.print", *args, **kwargs)

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Calls a method of every callback that has one of this name, with those of the arguments that it takes."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                rank_zero_warn(f"Skipping the callback `{type(callback).__name__}.{hook_name}` because it is not a method.")
                continue
            self._on_host(method, f"fabric.call({hook_name!r})", *args, **_taken(method, kwargs))

    def _on_host(self, function: Callable[..., Any], text: str, *args: Any, **kwargs: Any) -> None:
        """Call ``function``: now, or after each run of the step that is captured."""
        recorder = self._model.recorder
        if recorder is None:
            function(*args, **kwargs)
        else:
            recorder.calls.record(function, args, kwargs, text=text, state=None)


def _taken(method: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``kwargs`` that ``method`` accepts."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name in parameters}
