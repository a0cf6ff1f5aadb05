"""Calls of the Trainer's profiler by the loops; next to nothing where nobody profiles."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch_compat.callbacks.callback import Callback
from torch_compat.core.datamodule import LightningDataModule
from torch_compat.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
    XLAProfiler,
)
from torch_compat.run.hook_context import HookContext
from torch_compat.utilities.exceptions import MisconfigurationException

_Item = TypeVar("_Item")
_BY_NAME: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
    "xla": XLAProfiler,
}
_NOTHING = contextlib.nullcontext()


def make_profiler(profiler: Any) -> Profiler:
    """The profiler of ``Trainer(profiler=…)``.

    Raises:
        MisconfigurationException: an unknown name, or something that is no profiler.
    """
    if profiler is None:
        return PassThroughProfiler()
    if isinstance(profiler, Profiler):
        return profiler
    if isinstance(profiler, str):
        if profiler.lower() in _BY_NAME:
            return _BY_NAME[profiler.lower()]()
        raise MisconfigurationException(
            "When passing string value for the `profiler` parameter of `Trainer`, it can only be one of"
            f" {list(_BY_NAME)}; found {profiler!r}"
        )
    raise MisconfigurationException(f"Trainer(profiler={profiler!r}): expected one of {list(_BY_NAME)} or a Profiler")


def records(trainer: HookContext) -> bool:
    """Whether there is a profiler that records."""
    return type(trainer.profiler) is not PassThroughProfiler


def action(trainer: HookContext, name: str) -> AbstractContextManager[Any]:
    """Profile an action of the loops in the block."""
    return trainer.profiler.profile(name) if records(trainer) else _NOTHING


def hook_action(trainer: HookContext, owner: Any, hook: str) -> AbstractContextManager[Any]:
    """Profile hook ``hook`` of ``owner``, a callback, module or datamodule, in the block."""
    return trainer.profiler.profile(_hook_name(owner, hook)) if records(trainer) else _NOTHING


def profiled_hook(trainer: HookContext, owner: Any, hook: str) -> Callable[..., Any]:
    """The bound hook, recorded where somebody profiles."""
    method = getattr(owner, hook)
    if not records(trainer):
        return method
    name = _hook_name(owner, hook)

    @functools.wraps(method)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with trainer.profiler.profile(name):
            return method(*args, **kwargs)

    return recorded


def strategy_action(trainer: HookContext, method: str) -> AbstractContextManager[Any]:
    """Profile a step in the block, as an action of a strategy of Lightning."""
    return trainer.profiler.profile(f"[Strategy]{type(trainer.strategy).__name__}.{method}") if records(trainer) else _NOTHING


def profiled_batches(trainer: HookContext, name: str, batches: Iterable[_Item]) -> Iterator[_Item]:
    """``batches``, each wait for one an action."""
    iterator = iter(batches)
    if not records(trainer):
        return iterator
    return _profiled(trainer.profiler, name, iterator)


def _profiled(profiler: Profiler, name: str, iterator: Iterator[_Item]) -> Iterator[_Item]:
    while True:
        with profiler.profile(name):
            batch = next(iterator, _END)
        if batch is _END:
            return
        yield batch  # pyright: ignore[reportReturnType]


_END: Any = object()


def _hook_name(owner: Any, hook: str) -> str:
    if isinstance(owner, Callback):
        return f"[Callback]{owner.state_key}.{hook}"
    kind = "LightningDataModule" if isinstance(owner, LightningDataModule) else "LightningModule"
    return f"[{kind}]{type(owner).__name__}.{hook}"
