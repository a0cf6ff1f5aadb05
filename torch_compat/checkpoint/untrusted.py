"""Values of a checkpoint that only unpickling could make: stand-ins for them, and a loader that reads the rest safely."""

from __future__ import annotations

import datetime
import pathlib
import pickle
from typing import Any, NoReturn

import numpy as np
import torch
from torch import _weights_only_unpickler

HARMLESS: list[Any] = [
    # Values that users' checkpoints commonly hold, and whose constructors do nothing but hold what they are given.
    datetime.date,
    datetime.datetime,
    datetime.timedelta,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
    pathlib.WindowsPath,
    *(bool, bytes, dict, float, frozenset, int, list, range, slice, str, tuple),
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"},
    # numpy's way to make arrays and scalars, under the name of this numpy and of 1.x.
    *(
        name
        for function in (np.ones(()).__reduce__()[0], np.float64(0).__reduce__()[0])  # pyright: ignore
        for name in (function, (function, f"numpy.core.multiarray.{function.__name__}"))  # pyright: ignore[reportAttributeAccessIssue]
    ),
]
"""Beside what PyTorch's safe loader knows."""


class UntrustedValueError(RuntimeError):
    """Use of a value that the safe loader did not read."""


class UntrustedValue:
    """A stand-in, in a safely loaded checkpoint, for a value that only unpickling could make; every use of it raises."""

    def __init__(self, key: str) -> None:
        object.__setattr__(self, "_key", key)

    def __repr__(self) -> str:
        return f"<not loaded: checkpoint{object.__getattribute__(self, '_key')} needs weights_only=False>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UntrustedValueError(
            f"checkpoint{object.__getattribute__(self, '_key')} was not loaded: it can only be read by unpickling, which may run "
            "any code; load the checkpoint with weights_only=False if you trust where it comes from"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that look for an optional method: copy, pickle, numpy
            raise AttributeError(name)
        return self._refuse()

    __setattr__ = __call__ = __iter__ = __len__ = __bool__ = __getitem__ = __setitem__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __hash__ = object.__hash__


class StandIn(UntrustedValue):
    """An :class:`UntrustedValue` while its file is read: takes whatever the object would have been made of, and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> StandIn:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(f" ({type(self).__name__})")

    def _take(self, *_: Any) -> None:
        """An item, or the object's state."""

    def __call__(self, *_: Any, **__: Any) -> StandIn:
        """Call nothing: what would have come of a call that the file names is a stand-in too."""
        return StandIn()

    __setstate__ = __setitem__ = append = extend = add = _take


class _Unpickler(pickle.Unpickler):
    """Finds what PyTorch's safe loader may make; a stand-in in place of everything else, which is not even looked for."""

    def find_class(self, module: str, name: str, /) -> Any:
        full = f"{module}.{name}"
        allowed = _weights_only_unpickler._get_allowed_globals() | _weights_only_unpickler._get_user_allowed_globals()
        return allowed[full] if full in allowed else type(full, (StandIn,), {})


class _SafePickle:
    """A module, as far as ``torch.load(pickle_module=…)`` asks."""

    Unpickler = _Unpickler
    load = staticmethod(lambda file, **options: _Unpickler(file, **options).load())


def load_with_stand_ins(file: Any) -> Any:
    """``torch.load`` of a file in which the safe loader does not read everything; nothing that it names is imported or called."""
    with torch.serialization.safe_globals(HARMLESS):
        return torch.load(file, map_location="cpu", pickle_module=_SafePickle, weights_only=False)
