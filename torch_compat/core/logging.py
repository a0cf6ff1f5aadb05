"""The options of one ``self.log`` call, and the hooks that may log.

``LightningModule.log`` checks what can be checked without the loop and hands a :class:`LogOptions` to the Trainer, which
calls :func:`resolve` with the running hook's name.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.metric_types import is_metric
from torch_compat.utilities.rank_zero import WarningCache

Reduction = Literal["mean", "sum", "min", "max"]

# Values are logged at every step: each text is said once.
_warnings = WarningCache()

_REDUCTIONS: dict[Any, Reduction] = {
    "mean": "mean",
    "avg": "mean",
    "sum": "sum",
    "min": "min",
    "max": "max",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    sum: "sum",
    min: "min",
    max: "max",
}


@dataclass(frozen=True)
class LogOptions:
    """The arguments of ``LightningModule.log`` beside name and value; meanings as documented there.

    ``on_step`` and ``on_epoch`` are None where the hook's default applies; ``logger`` None means True unless the Trainer runs
    without loggers; ``reduce_fx`` is always one of ``"mean"``, ``"sum"``, ``"min"``, ``"max"``.
    """

    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: Reduction = "mean"
    enable_graph: bool = False
    sync_dist: bool = False
    sync_dist_group: Any | None = None
    add_dataloader_idx: bool = True
    batch_size: int | None = None
    metric_attribute: str | None = None
    rank_zero_only: bool = False


@dataclass(frozen=True)
class HookLogging:
    """The choice of ``on_step`` and ``on_epoch`` that a hook may ask for, and its defaults."""

    allowed_on_step: tuple[bool, ...]
    allowed_on_epoch: tuple[bool, ...]
    default_on_step: bool
    default_on_epoch: bool


_BATCH_OF_TRAINING = HookLogging((False, True), (False, True), default_on_step=True, default_on_epoch=False)
_BATCH_OF_EVALUATION = HookLogging((False, True), (False, True), default_on_step=False, default_on_epoch=True)
_EPOCH = HookLogging((False,), (True,), default_on_step=False, default_on_epoch=True)

HOOKS: dict[str, HookLogging] = {
    **dict.fromkeys(
        (
            "on_before_backward",
            "backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "optimizer_step",
            "configure_gradient_clipping",
            "clip_gradients",
            "on_before_zero_grad",
            "optimizer_zero_grad",
            "on_train_batch_start",
            "on_train_batch_end",
            "training_step",
        ),
        _BATCH_OF_TRAINING,
    ),
    **dict.fromkeys(
        (
            "on_validation_batch_start",
            "on_validation_batch_end",
            "on_test_batch_start",
            "on_test_batch_end",
            "validation_step",
            "test_step",
        ),
        _BATCH_OF_EVALUATION,
    ),
    **dict.fromkeys(
        (
            "on_train_start",
            "on_validation_start",
            "on_test_start",
            "on_train_epoch_start",
            "on_train_epoch_end",
            "on_validation_epoch_start",
            "on_validation_epoch_end",
            "on_test_epoch_start",
            "on_test_epoch_end",
        ),
        _EPOCH,
    ),
}
"""Hooks in which logging is allowed, as in Lightning 2.6; in every other hook it is an error."""

HOOKS_OF_ERAS: dict[str, HookLogging] = {
    "training_step_end": _BATCH_OF_TRAINING,
    **dict.fromkeys(("validation_step_end", "test_step_end"), _BATCH_OF_EVALUATION),
    **dict.fromkeys(("on_epoch_start", "on_epoch_end", "training_epoch_end", "validation_epoch_end", "test_epoch_end"), _EPOCH),
}
"""The same of the hooks that 2.0 removed: they run in modules of ``pytorch_lightning`` only."""


def reduction(reduce_fx: str | Callable[..., Any]) -> Reduction:
    """The name of a ``reduce_fx``; ``MisconfigurationException`` for a custom function."""
    key = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    try:
        return _REDUCTIONS[key]
    except (KeyError, TypeError):
        raise MisconfigurationException(
            f"Only `self.log(..., reduce_fx={{min,max,mean,sum}})` are supported, not {reduce_fx}. What else is"
            " to be made of an epoch's values, a `torchmetrics.Metric` can do: log that."
        ) from None


def check_value(name: str, value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is a number, a one-element tensor or a ``torchmetrics.Metric``."""
    if getattr(type(value), "comes_after_the_step", False):  # torch_compat.step.host.host_future
        value = value.example()
        if value is None:  # a value of a captured step, whose kind shows when there is one
            return
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"`self.log({name}, {_describe(value)})` was called, but the tensor must have a single element:"
                f" reduce it first, as in `self.log({name!r}, value.mean())`"
            )
        return
    if isinstance(value, Mapping):
        kind = "nested dictionaries" if any(isinstance(v, Mapping) for v in value.values()) else "`dict` values"
        raise ValueError(
            f"`self.log({name}, {value})` was called, but {kind} cannot be logged: use `self.log_dict` for one level of names."
        )
    # Instances whose `__class__` says int or float are host scalars of a captured step.
    if not isinstance(value, (int, float, numbers.Real)) and not is_metric(value):
        raise ValueError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged; expected a number, a"
            " tensor of one element or a metric"
        )


def warn_of_whole_number(hook: str, name: str, value: Any) -> None:
    """Say once that a logged tensor of whole numbers is reduced as floating point."""
    if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
        _warnings.warn(
            f"You called `self.log({name!r}, ...)` in your `{hook}` but the value needs to be floating to be reduced: it"
            f" is taken as {torch.get_default_dtype()}. Log `value.float()` if this is meant; a number that needs no mean, "
            f"such as a step count, goes straight to the logger: `self.logger.log_metrics({{{name!r}: ...}})`."
        )


def check_name(name: str, add_dataloader_idx: bool) -> None:
    """Raises unless ``name`` is a string that leaves the data loader's suffix to the Trainer."""
    if not isinstance(name, str):
        raise TypeError(f"`self.log(name, ...)` expects a string as name, found {type(name).__name__}: {name!r}.")
    if add_dataloader_idx and "/dataloader_idx_" in name:
        raise MisconfigurationException(
            f"You called `self.log` with the key `{name}` but it should not contain information about `dataloader_idx`: with"
            " add_dataloader_idx=True, the default, that is added. Leave it out, or pass add_dataloader_idx=False"
        )


def resolve(options: LogOptions, hook: str) -> LogOptions:
    """``options`` with ``on_step`` and ``on_epoch`` decided for ``hook``.

    Raises:
        MisconfigurationException: the hook cannot log, or not in that form, or both are False.
    """
    rules = HOOKS.get(hook) or HOOKS_OF_ERAS.get(hook)
    if rules is None:
        raise MisconfigurationException(
            f"You can't `self.log()` inside `{hook}`, which runs where no value is collected: write to the logger itself,"
            " `self.logger.log_metrics({...}, step)` or `self.logger.experiment`."
        )
    on_step = rules.default_on_step if options.on_step is None else options.on_step
    on_epoch = rules.default_on_epoch if options.on_epoch is None else options.on_epoch
    for argument, value, allowed in (
        ("on_step", on_step, rules.allowed_on_step),
        ("on_epoch", on_epoch, rules.allowed_on_epoch),
    ):
        if value not in allowed:
            raise MisconfigurationException(
                f"You can't `self.log({argument}={value})` inside `{hook}`, must be one of {allowed}."
            )
    if not on_step and not on_epoch:
        raise MisconfigurationException("`self.log(on_step=False, on_epoch=False)` is not useful: it logs nothing.")
    return replace(options, on_step=on_step, on_epoch=on_epoch)


def _describe(tensor: torch.Tensor) -> str:
    """A tensor for an error message; shape and dtype only while the step is captured, when it has no values."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.is_meta:
        return f"tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
    return str(tensor)
