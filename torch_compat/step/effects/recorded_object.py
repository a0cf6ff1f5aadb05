"""An object whose methods a captured step calls for their effect: a logger, and the ``experiment`` of a logger."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch_compat.step.host.calls import HostCalls
from torch_compat.step.host.host_future import HostFuture

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class RecordedObject:
    """A stand-in for ``target`` while a step is captured: methods are recorded, plain attributes are read.

    Args:
        calls: the recorder.
        target: the object itself.
        path: attributes that lead from the target to what this stands for; they are looked up anew at every call.
    """

    def __init__(self, calls: HostCalls, target: Any, path: tuple[str, ...] = ()) -> None:
        self._recorder = calls
        self._target = target
        self._path = path

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(_follow(self._target, self._path))

    def stands_for(self) -> Any:
        """The object itself."""
        return _follow(self._target, self._path)

    def __getattr__(self, name: str) -> Any:
        value = getattr(_follow(self._target, self._path), name)
        path = (*self._path, name)
        if isinstance(value, _PLAIN):
            return value
        if callable(value):
            return functools.partial(self._record, path)
        return RecordedObject(self._recorder, self._target, path)

    def _refuse(self, *_: Any) -> NoReturn:
        path = ".".join((type(self._target).__name__, *self._path))
        raise self._recorder.refuse(f"it looks at what is in {path}", "look at it in a hook such as on_train_batch_start")

    __len__ = __iter__ = __getitem__ = __contains__ = __bool__ = __float__ = __int__ = __index__ = _refuse

    def _record(self, path: tuple[str, ...], /, *args: Any, **kwargs: Any) -> HostFuture:
        target = self._target

        def call(*args: Any, **kwargs: Any) -> Any:
            return _follow(target, path)(*args, **kwargs)

        place = self._recorder.record(call, args, kwargs, text=f"{type(target).__name__}.{'.'.join(path)}")
        return HostFuture(self._recorder, place)


def _follow(target: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(getattr, path, target)
