"""``LearningRateMonitor``: logs learning rates, momenta and weight decays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.log_interval import should_log
from torch_compat.callbacks.optimizer_names import NamedOptimizer, check_rates, name_optimizers
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class LearningRateMonitor(Callback):
    """Logs the learning rate of every parameter group to the trainer's loggers.

    Names are ``lr-Adam``, ``lr-Adam-1`` for a second Adam, ``lr-Adam/pg1``, ``lr-Adam/pg2`` for parameter groups. The scheduler's
    ``name`` and the group's ``name`` replace them.

    ::

        trainer = pl.Trainer(callbacks=[LearningRateMonitor("step")], logger=CSVLogger("logs"))

    Args:
        logging_interval: "step" logs at the steps that the trainer logs at (``log_every_n_steps``), "epoch" at the start of
            epochs; None as each scheduler's ``interval`` says (optimizers without a scheduler: both).
        log_momentum: also log ``momentum`` or the first of ``betas`` as ``<name>-momentum``; 0 where an optimizer has neither.
        log_weight_decay: also log ``<name>-weight_decay``; 0 where an optimizer has none.

    ``lrs`` keeps all learning rates logged so far, ``last_momentum_values`` and ``last_weight_decay_values`` the last ones.

    Raises:
        MisconfigurationException: a ``logging_interval`` that is not one of these; no logger, parameter groups of one optimizer
            with the same name, or an optimizer of optax without an injected learning rate (at the start of training).

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.LearningRateMonitor.html
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise MisconfigurationException(f"logging_interval should be `step` or `epoch` or `None`, got {logging_interval!r}.")
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}

    def on_train_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if not trainer.loggers:
            raise MisconfigurationException(
                "Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger. Remove the callback or pass"
                " a logger."
            )
        check_rates("LearningRateMonitor", trainer.optimizers)
        if self.log_momentum and self._without_momentum(trainer):
            rank_zero_warn(
                "You have set log_momentum=True, but some optimizers do not have momentum. Theirs is logged as 0.",
                category=RuntimeWarning,
            )
        names = [name for entry in self._optimizers(trainer) for name in entry.group_names]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self.logging_interval != "epoch" and should_log(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped):
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self.logging_interval != "step":
            self._log(trainer, "epoch")

    def _log(self, trainer: Trainer, interval: str) -> None:
        values = self._extract_stats(trainer, interval if self.logging_interval is None else "any")
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def _extract_stats(self, trainer: Trainer, interval: str) -> dict[str, float]:
        """The values to log at ``interval``; also in ``trainer.callback_metrics``, so that other callbacks can monitor them."""
        values: dict[str, float] = {}
        for entry in self._optimizers(trainer):
            self._follow_new_groups(entry.group_names)
            if interval in (entry.interval, "any") or entry.interval is None:
                values |= self._optimizer_stats(entry)
        trainer.callback_metrics.update({name: torch.as_tensor(value) for name, value in values.items()})
        return values

    def _optimizer_stats(self, entry: NamedOptimizer) -> dict[str, float]:
        values: dict[str, float] = {}
        for group, name in zip(entry.optimizer.param_groups, entry.group_names, strict=True):
            values[name] = group["lr"]
            self.lrs[name].append(group["lr"])
            if self.log_momentum:
                momentum = group["betas"][0] if "betas" in entry.optimizer.defaults else group.get("momentum", 0)
                values[f"{name}-momentum"] = self.last_momentum_values[f"{name}-momentum"] = momentum
            if self.log_weight_decay:
                decay = group.get("weight_decay", 0)
                values[f"{name}-weight_decay"] = self.last_weight_decay_values[f"{name}-weight_decay"] = decay
        return values

    def _follow_new_groups(self, names: list[str]) -> None:
        """Move the history of the first parameter group from ``lr-Adam`` to ``lr-Adam/pg1`` when a second group joins it."""
        for name in names:
            if name not in self.lrs:
                self.lrs[name] = self.lrs.pop(name.removesuffix("/pg1"), []) if name.endswith("/pg1") else []

    @staticmethod
    def _optimizers(trainer: Trainer) -> list[NamedOptimizer]:
        return name_optimizers(trainer.lr_scheduler_configs, trainer.optimizers)

    @staticmethod
    def _without_momentum(trainer: Trainer) -> bool:
        scheduled = [config.scheduler.optimizer for config in trainer.lr_scheduler_configs]
        defaults = [optimizer.defaults for optimizer in scheduled or trainer.optimizers]
        return any("momentum" not in values for values in defaults) and any("betas" not in values for values in defaults)
