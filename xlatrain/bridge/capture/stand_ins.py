"""Traced tensors that stand for a module's parameters and buffers: to Python of the same class, with the same attributes."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.patches import patched

_PARAMETERS = type(torch.nn.Parameter)
_NO_TORCH_FUNCTION: Any = vars(torch.nn.Parameter)["__torch_function__"]
_SAID_ELSEWHERE = frozenset(
    {"__torch_function__", "__new__", "__init__", "__init_subclass__", "__repr__", "__str__", "__format__", "__reduce__"}
    | {"__reduce_ex__", "__deepcopy__", "__copy__", "__getstate__", "__setstate__", "__module__", "__doc__", "__dict__"}
    | {
        "__weakref__",
        "__annotations__",
        "__qualname__",
        "__slots__",
        "__static_attributes__",
        "__firstlineno__",
        "__orig_bases__",
    }
    | {"__orig_bases__", "__parameters__", "__hash__", "__abstractmethods__", "__annotate_func__", "__annotations_cache__"}
)
"""Members of a class that change nothing of what torch computes with its tensors."""
_OURS = frozenset(("_live", "_deferred"))
"""Attributes of tensors whose values are on the mesh, or not yet computed; for each the class is a subclass of ours."""


def standing_for(traced: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``traced``, from now on with what user code has set on ``tensor`` (``p.lr_scale = 0.1``) and, to ``isinstance``, its class.

    Raises:
        CaptureError: its class decides itself what torch's functions do with it, which a traced tensor cannot.
    """
    kind = class_of(tensor)
    owner = next(one for one in kind.__mro__ if "__torch_function__" in one.__dict__)
    follows = owner.__module__.partition(".")[0] == "torch" or owner.__dict__["__torch_function__"] is _NO_TORCH_FUNCTION
    if not follows or (changed := _changed(kind)):
        how = "__torch_function__" if not follows else changed
        raise CaptureError(
            f"a parameter or buffer is a {kind.__module__}.{kind.__qualname__}, and {owner.__qualname__}.{how} "
            "decides what torch's functions do with it, which a compiled step does not follow. Fix: keep an ordinary "
            "nn.Parameter, and call those functions by name"
        )
    for one in reversed(_own(kind)):
        vars(traced).update(_bound(traced, kind, name, member) for name, member in vars(one).items() if not _is_special(name))
    held = vars(traced)
    held.update((name, value) for name, value in vars(tensor).items() if name not in _OURS and name not in held)
    return stand_for(traced, tensor)


def _own(kind: type) -> list[type]:
    """The classes of a tensor's class that are not torch's."""
    return [one for one in kind.__mro__ if one.__module__.partition(".")[0] != "torch" and one is not object]


def _changed(kind: type) -> str | None:
    """A member of the class that Python asks the class for, so that a traced tensor cannot have it; None: there is none."""
    for one in _own(kind):
        for name, member in vars(one).items():
            special = _is_special(name) and name not in _SAID_ELSEWHERE
            if special or (not _is_special(name) and isinstance(member, property | functools.cached_property)):
                return name
    return None


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _bound(traced: torch.Tensor, kind: type, name: str, member: Any) -> tuple[str, Any]:
    if isinstance(member, types.FunctionType):
        return name, types.MethodType(member, traced)
    return name, member.__get__(None, kind) if isinstance(member, classmethod | staticmethod) else member


def stand_for(traced: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``traced``, which stands for ``tensor`` from now on: where it stays, nothing is changed."""
    traced._xlatrain_stands_for = tensor  # pyright: ignore[reportAttributeAccessIssue]
    return traced


def stood_for(value: Any) -> torch.Tensor | None:
    """The parameter or buffer that a traced tensor stands for, if it does."""
    return getattr(value, "_xlatrain_stands_for", None) if issubclass(type(value), torch.Tensor) else None


def is_still(before: Any, now: Any) -> bool:
    """Whether ``now`` is what stands for ``before``, a tensor on the mesh: ``x += 1`` has assigned it to where that was."""
    return before is not None and stood_for(now) is before


def class_of(tensor: torch.Tensor) -> type:
    """The class that the user's code knows of a tensor: of what stands for another, that of the other; of traced ones theirs."""
    if (original := stood_for(tensor)) is not None:
        tensor = original
    kind = type(tensor)
    if (known := getattr(kind, "_xlatrain_kind", None)) is not None:
        return known
    if issubclass(kind, FunctionalTensor | FakeTensor):
        return torch.Tensor
    for _ in _OURS & vars(tensor).keys():  # both, where a preflight has placed one without values
        kind = kind.__bases__[1]
    return kind


@contextlib.contextmanager
def as_parameters() -> Iterator[None]:
    """In the block what stands for a parameter is one to ``isinstance``, also one of the user's own class of them.

    ``module.to(device)``, ``.float()`` and their like do nothing where they change nothing: torch's read gradients, too.
    """
    check: Any = _PARAMETERS.__instancecheck__

    def stands_for_one(kind: Any, value: Any) -> bool:
        original = stood_for(value)
        return check(kind, value) if original is None else issubclass(type(original), kind)

    apply: Any = torch.nn.Module._apply

    def changing(module: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        if getattr(fn, "__qualname__", "").startswith("Module."):  # torch's own, which may be called twice
            with torch.no_grad():
                if all(fn(one) is one for tensors in (module.parameters, module.buffers) for one in tensors(recurse)):
                    return module
        return apply(module, fn, recurse)

    with patched([(_PARAMETERS, "__instancecheck__", stands_for_one), (torch.nn.Module, "_apply", changing)]):
        yield
