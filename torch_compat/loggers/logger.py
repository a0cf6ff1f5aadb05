"""``Logger``: the base class of experiment loggers."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from torch_compat.utilities.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from argparse import Namespace

    from torch import Tensor
    from torch.nn import Module

    from torch_compat.callbacks.model_checkpoint import ModelCheckpoint

_L = TypeVar("_L", bound="Logger")


class Logger(ABC):
    """Base class of experiment loggers.

    A subclass gives ``name``, ``version``, ``log_metrics`` and ``log_hyperparams``; process 0 writes, the others do nothing
    (decorate with ``rank_zero_only``, and the ``experiment`` property with ``rank_zero_experiment``).

    API: https://lightning.ai/docs/pytorch/2.6.0/extensions/logging.html
    """

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Version of the experiment."""

    @property
    def root_dir(self) -> str | None:
        """Directory that holds all versions of the experiment; None if nothing is written locally."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Directory of this version; None if nothing is written locally."""
        return None

    @property
    def save_dir(self) -> str | None:
        """Directory that holds all experiments; None if nothing is written locally."""
        return None

    @property
    def group_separator(self) -> str:
        """The separator between a group and a name in a metric's key."""
        return "/"

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Records scalar metrics at a step."""

    @abstractmethod
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Records hyperparameters; further arguments are the logger's own."""

    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:  # noqa: B027 - optional
        """Records the model's graph, from ``input_array`` or else from ``model.example_input_array``."""

    def save(self) -> None:  # noqa: B027 - optional
        """Writes what is buffered."""

    def finalize(self, status: str) -> None:
        """Ends the experiment with "success", "finished", "failed" or "aborted"."""
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:  # noqa: B027 - optional
        """Called on process 0 after ``checkpoint_callback`` has started a save."""


def rank_zero_experiment(fn: Callable[[_L], Any]) -> Callable[[_L], Any]:
    """Decorates an ``experiment`` getter: process 0 gets the real one, the others get a ``DummyExperiment``."""

    @functools.wraps(fn)
    def experiment(self: _L) -> Any:
        if getattr(rank_zero_only, "rank", 0) > 0:
            return DummyExperiment()
        return fn(self)

    return experiment


class DummyExperiment:
    """Accepts any method call and any index, and does nothing."""

    def nop(self, *args: Any, **kw: Any) -> None:
        """Do nothing."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return self.nop

    def __getitem__(self, idx: int) -> DummyExperiment:
        return self

    def __setitem__(self, *args: Any, **kwargs: Any) -> None:
        pass


class DummyLogger(Logger):
    """A stand-in for the user's loggers (with ``fast_dev_run``), so that user code that calls them still works."""

    def __init__(self) -> None:
        super().__init__()
        self._experiment = DummyExperiment()

    @property
    def experiment(self) -> DummyExperiment:
        """An object that accepts every call."""
        return self._experiment

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getitem__(self, idx: int) -> DummyLogger:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Methods of any concrete logger (`log_image`, `watch`, ...). Dunder lookups must fail as they do on any object: copy and
        # pickle probe for them.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> None:
            return None

        return method


def merge_dicts(
    dicts: Sequence[Mapping[str, Any]],
    agg_key_funcs: Mapping[str, Any] | None = None,
    default_func: Callable[[Sequence[float]], float] = np.mean,  # pyright: ignore[reportArgumentType]
) -> dict[str, Any]:
    """Merge dicts: values of a key that several have are aggregated.

    Args:
        dicts: of numbers, or nested.
        agg_key_funcs: key → function of the list of its values; nested as the dicts are.
        default_func: for other keys.
    """
    functions = agg_key_funcs or {}
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in dicts for key in one):
        found = [value for one in dicts if (value := one.get(key)) is not None]
        function = functions.get(key)
        if found and isinstance(found[0], Mapping):
            merged[key] = merge_dicts(found, function, default_func)
        else:
            merged[key] = (function or default_func)(found) if found else None
    return merged
