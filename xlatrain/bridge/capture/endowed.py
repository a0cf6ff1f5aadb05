"""Traced tensors of a class of the user's own: torchvision's images and masks, and others that only wrap a plain tensor."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.patches import patched

_TORCH_FUNCTION: Any = vars(torch.Tensor)["__torch_function__"].__func__
_AS_SUBCLASS = torch.Tensor.as_subclass
_SET_CLASS: Any = vars(object)["__class__"].__set__
_GIVEN = "_xlatrain_given"
"""An endowed tensor's attributes as it was given them, and the names of all that it had then."""


class _Traced(FakeTensor):
    """The end of each endowed class: to ``super()`` of the user's classes it is ``torch.Tensor``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _TORCH_FUNCTION(cls, func, types, args, kwargs)  # Tensor's itself torch replaces in classes with a dispatch


def endowed(traced: torch.Tensor, kind: type, attributes: Mapping[str, Any]) -> torch.Tensor:
    """``traced``, from now on of a class whose methods are those of ``kind``, to ``isinstance`` one, with these attributes.

    Raises:
        CaptureError: ``kind`` is more than Python around a plain tensor.
    """
    try:
        _SET_CLASS(traced, _class_of(kind))
    except TypeError as error:
        raise _refusal(kind) from error
    held = vars(traced)
    held.update(attributes)
    held[_GIVEN] = (attributes, frozenset(held))
    return traced


def check_kept(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a step that has set an attribute of an endowed tensor that it was given.

    Raises:
        CaptureError: it has.
    """
    for tensor in filter(is_endowed, tensors):
        held = vars(tensor)
        given, names = held[_GIVEN]
        changed = [name for name, value in given.items() if held.get(name, held) is not value]
        if changed := changed or [name for name in held if name not in names and not name.startswith("_")]:
            raise CaptureError(f"the step sets `{changed[0]}` of a {type(tensor).__name__} of the batch, which it was given")


def is_endowed(value: Any) -> bool:
    """Whether a tensor is a traced one of a class of the user's own."""
    return issubclass(type(value), _Traced)


def check_outgoing(tensor: torch.Tensor) -> None:
    """Nothing, where a tensor that leaves a compiled step is an ordinary one.

    Raises:
        CaptureError: it has a class of the user's own, which programs don't give.
    """
    if is_endowed(tensor):
        raise CaptureError(
            f"the step returns, logs or keeps a {tensor.__class__.__module__}.{tensor.__class__.__qualname__}, and a compiled "
            "step gives ordinary tensors only. Fix: x.as_subclass(torch.Tensor)"
        )


@contextlib.contextmanager
def endowing() -> Iterator[None]:
    """In the block ``as_subclass`` of a traced tensor gives a traced one of that class."""

    def as_subclass(tensor: torch.Tensor, cls: type) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return _AS_SUBCLASS(tensor, cls)
        with torch._C.DisableTorchFunctionSubclass():
            alias = torch.ops.aten.alias.default(tensor)
        kind = vars(cls).get("_xlatrain_kind", cls)
        return alias if kind.__module__.partition(".")[0] == "torch" else endowed(alias, kind, {})

    with patched([(torch.Tensor, "as_subclass", as_subclass)]):
        yield


@functools.cache
def _class_of(kind: type) -> type:
    """The class of traced tensors that are ``kind``s: a subclass of it, and of those of its bases.

    Raises:
        CaptureError: its tensors are no plain ones.
    """
    own = [one for one in kind.__mro__ if one is not object and one.__module__.partition(".")[0] != "torch"]
    if any(name in vars(one) for one in own for name in ("__torch_dispatch__", "__init_subclass__")):
        raise _refusal(kind)
    bases = [base for base in kind.__bases__ if issubclass(base, torch.Tensor) and base.__module__.partition(".")[0] != "torch"]
    known = {"_xlatrain_kind": kind, "__class__": property(lambda _: kind), "__module__": kind.__module__}
    return type(kind)(kind.__name__, (kind, *map(_class_of, bases), _Traced), {**known, "__qualname__": kind.__qualname__})


def _refusal(kind: type) -> CaptureError:
    return CaptureError(
        f"the batch holds a {kind.__module__}.{kind.__qualname__}, which is more than Python around a plain tensor. "
        "Fix: make it an ordinary tensor in on_before_batch_transfer"
    )
