"""Sequences of which only the running step knows how long they are, until somebody has to know.

Lists, results and calls on the host get them cut once the step has run. Everything else (an op, ``shape``) asks for the length,
which is assumed then and checked by the program.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from xlatrain.bridge.capture.cut import UnknownValueError, assume, really
from xlatrain.bridge.random import refusal

_T = torch.Tensor
_SAME = frozenset(
    {
        *(getattr(_T, name).__get__ for name in ("dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_leaf")),
        *(_T.dim, _T.ndimension, _T.is_floating_point, _T.is_complex, _T.element_size, _T.__hash__),
    }
)
"""What is asked of a tensor and is the same whatever its length is."""
_KEEPING = frozenset({_T.detach, _T.clone, _T.contiguous, _T.cpu, _T.cuda, _T.long, _T.int})
"""What gives a sequence again, as long as the first."""


class Uncut(FakeTensor):
    """Sequences in a run: of ``whole``, int64[B, T], the first ``length`` columns, an int64 scalar of the run."""

    __name__ = "Tensor"
    whole: torch.Tensor
    length: torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and type(args[0]) is cls:
            one, rest = args[0], args[1:]
            if func in _SAME:
                return func(one.whole)
            if func in _KEEPING:
                return uncut(func(one.whole, *rest, **kwargs), one.length)
            if func is _T.__getitem__ and (start := _start(rest[0])) is not None:
                return uncut(one.whole[:, start:], (one.length - start).clamp(min=0))
        args, kwargs = pytree.tree_map_only(cls, cls.cut, (args, kwargs))
        return func(*args, **kwargs)

    def cut(self) -> torch.Tensor:
        """The sequences as long as they are, by an assumed length."""
        if "known" not in vars(self):
            self.known = cut(self.whole, self.length)
        return self.known


def uncut(whole: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """The first ``length`` columns of ``whole``, of a run; of a length that is known where the run is not recorded.

    Raises:
        CaptureError: it cannot be known there.
    """
    if type(whole) is not FakeTensor or whole.requires_grad:
        return cut(whole, length)
    with really():
        made: Any = whole.detach()  # no op of the run
    made.__class__ = Uncut
    made.whole, made.length = whole, length
    return made


def cut(whole: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """The first ``length`` columns of ``whole``, a length that is assumed.

    Raises:
        CaptureError: none may be assumed.
    """
    try:
        return whole[:, : assume(length, lambda: length.to(torch.int32), likely=whole.shape[1])]
    except UnknownValueError as error:
        raise refusal(
            "the length of a generated sequence is only known after the step, and nothing is assumed of this call",
            "use the sequence on the host (a list, tokenizer.batch_decode), or generate outside of the step",
        ) from error


def _start(key: Any) -> int | None:
    """Where the columns begin that a key takes up to the last: ``[:, 5:]``."""
    if type(key) is not tuple or len(key) != 2 or key[0] not in (slice(None), ...) or type(key[1]) is not slice:
        return None
    start, stop, step = key[1].start, key[1].stop, key[1].step
    return start if type(start) is int and start >= 0 and stop is None and step is None else None
