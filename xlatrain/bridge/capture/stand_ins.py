"""Traced tensors that stand for a module's parameters and buffers: to Python of the same class, with the same attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.patches import patched

_PARAMETERS = type(torch.nn.Parameter)
_OURS = frozenset(("_live", "_deferred"))
"""Attributes of tensors whose values are on the mesh, or not yet computed; for each the class is a subclass of ours."""


def standing_for(traced: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``traced``, from now on with what user code has set on ``tensor`` (``p.lr_scale = 0.1``) and, to ``isinstance``, its class.

    Raises:
        CaptureError: its class decides itself what torch's functions do with it, which a traced tensor cannot.
    """
    kind = class_of(tensor)
    owner = next(one for one in kind.__mro__ if "__torch_function__" in one.__dict__)
    if owner.__module__.partition(".")[0] != "torch":
        raise CaptureError(
            f"a parameter or buffer is a {kind.__module__}.{kind.__qualname__}, and {owner.__qualname__}.__torch_function__ "
            "decides what torch's functions do with it, which a compiled step does not follow. Fix: keep an ordinary "
            "nn.Parameter, and call those functions by name"
        )
    held = vars(traced)
    held.update((name, value) for name, value in vars(tensor).items() if name not in _OURS and name not in held)
    return stand_for(traced, tensor)


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
    """The class that the user's code knows of a parameter or buffer, or of what stands for one."""
    if (original := stood_for(tensor)) is not None:
        tensor = original
    kind = type(tensor)
    for _ in _OURS & vars(tensor).keys():  # both, where a preflight has placed one without values
        kind = kind.__mro__[2]
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
