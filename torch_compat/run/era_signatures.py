"""Hooks with the parameters of their era: ``optimizer_idx`` and its like are passed where an override asks for them.

A class written for 1.x gets, in the place of an override with its era's parameters, a method that today's loops can call. Calls
in the old form (``super().optimizer_step(epoch, batch_idx, optimizer, optimizer_idx, …)``) go through unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

# Today's parameters, then those of 1.x, in the order that both documentations give.
_LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "on_train_batch_start": (("batch", "batch_idx"), ("batch", "batch_idx", "dataloader_idx")),
    "on_train_batch_end": (("outputs", "batch", "batch_idx"), ("outputs", "batch", "batch_idx", "dataloader_idx")),
    **{
        f"on_{stage}_batch_start": (("batch", "batch_idx"), ("batch", "batch_idx", "dataloader_idx"))
        for stage in ("validation", "test", "predict")
    },
    **{
        f"on_{stage}_batch_end": (("outputs", "batch", "batch_idx"), ("outputs", "batch", "batch_idx", "dataloader_idx"))
        for stage in ("validation", "test", "predict")
    },
    "on_train_epoch_end": ((), ("outputs",)),
    "on_predict_epoch_end": ((), ("results",)),
    "on_before_optimizer_step": (("optimizer",), ("optimizer", "optimizer_idx")),
    "optimizer_zero_grad": (("epoch", "batch_idx", "optimizer"), ("epoch", "batch_idx", "optimizer", "optimizer_idx")),
    "optimizer_step": (
        ("epoch", "batch_idx", "optimizer", "optimizer_closure"),
        (
            "epoch", "batch_idx", "optimizer", "optimizer_idx", "optimizer_closure", "on_tpu", "using_native_amp", "using_lbfgs",
        ),
    ),
    "backward": (("loss",), ("loss", "optimizer", "optimizer_idx")),
    "lr_scheduler_step": (("scheduler", "metric"), ("scheduler", "optimizer_idx", "metric")),
    "configure_gradient_clipping": (
        ("optimizer", "gradient_clip_val", "gradient_clip_algorithm"),
        ("optimizer", "optimizer_idx", "gradient_clip_val", "gradient_clip_algorithm"),
    ),
    "transfer_batch_to_device": (("batch", "device", "dataloader_idx"), ("batch", "device")),
}  # fmt: skip
_BY_KEYWORD = ("optimizer_closure", "on_tpu", "using_native_amp", "using_lbfgs")  # so 1.x passed these: in any order
_FLAGS = {"dataloader_idx": 0, "on_tpu": False, "using_native_amp": False, "using_lbfgs": False}


Layouts = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]


def callback_layouts() -> Layouts:
    """The layouts of callbacks' hooks, which get the trainer and the module first."""
    first = ("trainer", "pl_module")
    module_only = ("optimizer_zero_grad", "optimizer_step", "backward", "lr_scheduler_step", "configure_gradient_clipping")
    return {
        name: ((*first, *modern), (*first, *old))
        for name, (modern, old) in _LAYOUTS.items()
        if name.startswith("on_") and name not in module_only
    }


def modernise(
    cls: type, own: Callable[[type], bool], owner: Callable[[Any, tuple[Any, ...]], Any], layouts: Layouts | None = None
) -> None:
    """Wrap the hooks of ``cls`` that have 1.x's parameters.

    Args:
        cls: a user's module or callback class.
        own: whether a class is ours, so that its methods stay.
        owner: of the hook's ``self`` and arguments, what knows ``optimizer_idx``, ``outputs`` and ``results`` by name.
        layouts: hook → today's and 1.x's parameters; None: those of modules.
    """
    for name, (modern, old) in (_LAYOUTS if layouts is None else layouts).items():
        definer = next((kind for kind in cls.__mro__ if name in kind.__dict__), None)
        if definer is None or own(definer):
            continue
        function = definer.__dict__[name]
        if not inspect.isfunction(function) or hasattr(function, "_modern"):
            continue
        count = _positional(function) - 1
        if count == len(modern) or (count < len(modern) and len(old) >= len(modern)):
            continue
        setattr(cls, name, _adapted(function, modern, old[:count], owner))


def _adapted(
    function: Callable[..., Any], modern: tuple[str, ...], old: tuple[str, ...], owner: Callable[[Any, tuple[Any, ...]], Any]
) -> Callable[..., Any]:
    asked = list(inspect.signature(function).parameters)[1:]

    @functools.wraps(function)
    def adapted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) > len(modern) or set(kwargs) - set(modern):
            return function(self, *args, **kwargs)  # the old form: a direct call
        values = {**_FLAGS, **dict(zip(modern, args, strict=False)), **kwargs}
        knows = owner(self, args)

        def value(name: str, parameter: str) -> Any:
            if name in values:
                return values[name]
            return None if name == "outputs" and parameter != "outputs" else knows(name, values)  # 1.5 calls it `unused`

        names = [parameter if parameter in _BY_KEYWORD else name for name, parameter in zip(old, asked, strict=False)]
        return function(self, *map(value, names, asked))

    adapted._modern = True  # pyright: ignore[reportAttributeAccessIssue]
    return adapted


def _positional(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in inspect.signature(function).parameters.values())


def accepts(method: Callable[..., Any], name: str) -> bool:
    """Whether a method has a parameter ``name``."""
    return name in inspect.signature(method).parameters
