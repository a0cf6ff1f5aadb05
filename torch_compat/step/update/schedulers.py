"""``configure_optimizers``: its documented return forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torch_compat.run import hook_calls as call
from torch_compat.step.optimizers.optax_optimizer import OptaxOptimizer, is_transformation
from torch_compat.step.run_context import RunContext
from torch_compat.utilities.exceptions import MisconfigurationException, MissingKeyError
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.types import LRSchedulerConfig, LRSchedulerTypeTuple, _Stateful

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule


_NO_FREQUENCIES = (
    "configure_optimizers: the 'frequency' of an optimizer is not offered; set `self.automatic_optimization = False` and "
    "choose the optimizer by batch_idx in training_step"
)
_OF_AUTOMATIC = frozenset({"reduce_on_plateau", "monitor", "strict"})
"""Keys of a scheduler's dict that mean nothing where the module steps it itself."""


def configure_optimizers(module: LightningModule, run: RunContext) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Call the user's ``configure_optimizers`` and read what it returns.

    Raises:
        MisconfigurationException: a form that Lightning does not document.
    """
    found = call.module_hook(run, "configure_optimizers")
    if run.era is not None:
        _refuse_frequencies(found)
    if found is None:
        rank_zero_warn(
            "`LightningModule.configure_optimizers` returned `None`, this fit will run with no optimizer, and change no weights"
        )
        return [], []
    if is_transformation(found):
        found = {"optimizer": found}
    if isinstance(found, Mapping) and is_transformation(found.get("optimizer")):
        found = {**found, "optimizer": OptaxOptimizer(found["optimizer"], module.named_parameters())}
    optimizers, raw, monitor = _read(found)
    schedulers = [_config(one, monitor, module) for one in raw]
    for config in schedulers:
        if not any(getattr(config.scheduler, "optimizer", optimizer) is optimizer for optimizer in optimizers):
            raise MisconfigurationException(
                "Some schedulers are attached with an optimizer that wasn't returned from `configure_optimizers`; "
                f"return it as well ({type(config.scheduler).__name__})"
            )
    return optimizers, schedulers


def scheduler_configs(entries: Sequence[Any], run: RunContext) -> list[LRSchedulerConfig]:
    """Schedulers that a plugin of 1.x made: themselves, or the dicts of ``configure_optimizers``; those of the Trainer stay."""
    known = {id(config.scheduler): config for config in run.lr_scheduler_configs}
    return [
        entry if isinstance(entry, LRSchedulerConfig) else known.get(id(entry)) or _config(entry, None, run.lightning_module)
        for entry in entries
    ]


def refuse_frequencies(frequencies: Sequence[int]) -> None:
    """Refuse frequencies: 1.x takes turns of several optimizers, so many batches each."""
    if len(frequencies) > 1:
        raise MisconfigurationException(_NO_FREQUENCIES)


def _refuse_frequencies(found: Any) -> None:
    """Refuse frequencies: 1.x takes turns of several optimizers, by a ``frequency`` beside each."""
    several = isinstance(found, Sequence) and len(found) > 1
    if several and any(isinstance(one, Mapping) and one.get("frequency") is not None for one in found):
        raise MisconfigurationException(_NO_FREQUENCIES)


def _read(found: Any) -> tuple[list[Optimizer], list[Any], str | None]:
    """Optimizers, scheduler entries, and a monitor given beside them."""
    if isinstance(found, Optimizer):
        return [found], [], None
    if isinstance(found, Mapping):
        return _read_dict(found)
    if isinstance(found, Sequence) and found:
        if len(found) == 2 and isinstance(found[0], Sequence) and all(isinstance(opt, Optimizer) for opt in found[0]):
            schedulers = found[1] if isinstance(found[1], Sequence) else [found[1]]
            return list(found[0]), list(schedulers), None
        if all(isinstance(one, Optimizer) for one in found):
            return list(found), [], None
        if all(isinstance(one, Mapping) for one in found):
            parts = [_read_dict(one) for one in found]
            return (
                [opt for opts, _, _ in parts for opt in opts],
                [_with_monitor(sch, monitor) for _, schs, monitor in parts for sch in schs],
                None,
            )
    raise MisconfigurationException(
        f"Unknown configuration for model optimizers: `configure_optimizers` returned {type(found).__name__}; expected "
        "an optimizer, a list or tuple of optimizers, two lists (optimizers, schedulers), a dict with the keys 'optimizer' and "
        "'lr_scheduler', several such dicts, or None. "
        "One optax transformation, for all parameters, is an optimizer too; each of several needs its parameters: "
        "torch_compat.step.optimizers.OptaxOptimizer(transformation, self.part.named_parameters())"
    )


def _read_dict(found: Mapping[str, Any]) -> tuple[list[Optimizer], list[Any], str | None]:
    known = {"optimizer", "lr_scheduler", "monitor"}
    if extra := set(found) - known:
        rank_zero_warn(
            f"Found unsupported keys in the optimizer configuration: {extra}; known keys: {sorted(known)}",
            category=RuntimeWarning,
        )
    if "optimizer" not in found:
        raise MissingKeyError(
            f"'optimizer': configure_optimizers returned a dict with the keys {sorted(found)}; it needs 'optimizer', and may "
            "have 'lr_scheduler'"
        )
    scheduler = found.get("lr_scheduler")
    return [found["optimizer"]], [] if scheduler is None else [scheduler], found.get("monitor")


def _with_monitor(entry: Any, monitor: str | None) -> Any:
    if isinstance(entry, Mapping) or monitor is None:
        return entry
    return {"scheduler": entry, "monitor": monitor}


def _config(entry: Any, monitor: str | None, module: LightningModule) -> LRSchedulerConfig:
    of_dict = isinstance(entry, Mapping)
    if not of_dict:
        entry = {"scheduler": entry}
    if "scheduler" not in entry:
        raise MisconfigurationException('The lr scheduler dict must have the key "scheduler", with the scheduler itself')
    known = {field.name for field in fields(LRSchedulerConfig)}
    if not module.automatic_optimization:
        return _config_by_hand(entry, known)
    if extra := set(entry) - known:
        rank_zero_warn(
            f"Found unsupported keys in the lr scheduler dict: {extra}. Known keys: {sorted(known)}",
            category=RuntimeWarning,
        )
    plateau = isinstance(entry["scheduler"], ReduceLROnPlateau)
    given: dict[str, Any] = {"reduce_on_plateau": plateau}
    given.update((key, value) for key, value in entry.items() if key in known)
    config = LRSchedulerConfig(**given)
    config.monitor = config.monitor or (monitor if config.reduce_on_plateau and not of_dict else None)
    _check(config, module, of_dict=of_dict)
    return config


def _config_by_hand(entry: Mapping[str, Any], known: set[str]) -> LRSchedulerConfig:
    """The configuration of a scheduler that the module steps itself."""
    if ignored := [key for key in entry if key in _OF_AUTOMATIC]:
        rank_zero_warn(
            f"The lr scheduler dict contains the key(s) {ignored}, but the keys will be ignored: with manual optimization "
            "your `training_step` calls `self.lr_schedulers().step()` when it wants to.",
            category=RuntimeWarning,
        )
    if extra := set(entry) - known:
        raise TypeError(
            f"configure_optimizers: unknown keys {sorted(extra)} in the lr_scheduler dict; known keys: {sorted(known)}"
        )
    return LRSchedulerConfig(**{key: value for key, value in entry.items() if key not in _OF_AUTOMATIC})


def _check(config: LRSchedulerConfig, module: LightningModule, *, of_dict: bool) -> None:
    if config.interval not in ("step", "epoch"):
        raise MisconfigurationException(
            f'The "interval" key in lr scheduler dict must be "step" or "epoch" but is "{config.interval}"'
        )
    if config.reduce_on_plateau and config.monitor is None:
        raise MisconfigurationException(
            f"{'The lr scheduler dict' if of_dict else '`configure_optimizers`'} must include a monitor when a "
            '`ReduceLROnPlateau` scheduler is used; for example {"optimizer": optimizer, "lr_scheduler": '
            '{"scheduler": scheduler, "monitor": "val_loss"}}'
        )
    if of_dict and isinstance(config.scheduler, torch.optim.lr_scheduler.OneCycleLR) and config.interval == "epoch":
        rank_zero_warn(
            "A `OneCycleLR` scheduler is using 'interval': 'epoch'. Are you sure you didn't mean 'interval': 'step'? Then return "
            '{"scheduler": scheduler, "interval": "step"}',
            category=RuntimeWarning,
        )
    name = type(config.scheduler).__name__
    if not isinstance(config.scheduler, _Stateful):
        raise TypeError(
            f"The provided lr scheduler `{name}` is invalid. It should have `state_dict` and `load_state_dict` methods, for "
            "checkpoints"
        )
    if not isinstance(config.scheduler, LRSchedulerTypeTuple) and not call.is_overridden("lr_scheduler_step", module):
        raise MisconfigurationException(
            f"The provided lr scheduler `{name}` doesn't follow PyTorch's LRScheduler API: it is no subclass of "
            "torch.optim.lr_scheduler.LRScheduler. Override `LightningModule.lr_scheduler_step` with how it steps"
        )
