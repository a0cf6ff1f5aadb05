"""The printing and logging members of a LightningModule. API: ``lightning.pytorch.LightningModule`` 2.6."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_compat.core.logging import LogOptions, check_name, check_value, reduction
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.metric_types import is_collection, is_metric
from torch_compat.utilities.rank_zero import WarningCache, rank_zero_warn

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.types import _METRIC

_warnings = WarningCache()

_UNATTACHED_LOG = (
    "You are trying to `self.log()` but the `self.trainer` reference is not registered on the model yet:"
    " `trainer.fit(model)` sets it, as `validate`, `test` and `predict` do"
)


class LoggingMembers(nn.Module):
    """The members of a LightningModule that show and log values; where they go is the Trainer's, or Fabric's, to decide."""

    trainer: Trainer
    device: torch.device
    _trainer: Trainer | None
    _fabric: Any | None
    _metric_attributes: dict[int, str] | None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on process 0, above the progress bar; arguments as for Python's ``print``."""
        if not self.trainer.is_global_zero:
            return
        progress_bar = self.trainer.progress_bar_callback
        # A progress bar of the user's own need not know whether it is enabled.
        if progress_bar is not None and getattr(progress_bar, "is_enabled", True):
            progress_bar.print(*args, **kwargs)
        else:
            print(*args, **kwargs)

    def log(
        self,
        name: str,
        value: _METRIC,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Logs a value under a name.

        Args:
            name: the key; the same on all processes.
            value: a number, a tensor with one element, or a ``torchmetrics.Metric``.
            prog_bar: show it on the progress bar.
            logger: give it to the loggers; True by default (False with Fabric's own rules).
            on_step: log it at this step. None: the hook's default (True in the hooks of a training batch).
            on_epoch: log it reduced over the epoch. None: the hook's default (True except in the hooks of a training batch).
            reduce_fx: the reduction over the epoch: mean, sum, min or max, or torch's function of that name.
            enable_graph: keep the autograd graph of ``value``.
            sync_dist: reduce over processes. A value computed inside a step on a mesh is already global.
            sync_dist_group: the process group to reduce over.
            add_dataloader_idx: append ``/dataloader_idx_N`` when there are several evaluation loaders.
            batch_size: weight in an epoch mean; the batch's dim 0 by default.
            metric_attribute: name of the attribute that holds ``value``, where it cannot be found.
            rank_zero_only: only process 0 calls this (then ``sync_dist`` would hang).

        Raises:
            ValueError: the value cannot be logged.
            MisconfigurationException: the hook or the combination of arguments does not allow it.
        """
        if self._fabric is not None:
            self._log_dict_through_fabric({name: value}, logger=logger)
            return
        trainer = self._trainer
        if trainer is None:
            rank_zero_warn(_UNATTACHED_LOG)
            return
        if trainer.barebones:
            rank_zero_warn(
                "You are trying to `self.log()` but `Trainer(barebones=True)` is configured, which logs nothing:"
                " the value is dropped."
            )
            return
        check_name(name, add_dataloader_idx)
        check_value(name, value)
        if logger and not trainer.loggers:
            _warnings.warn(
                f"You called `self.log({name!r}, ..., logger=True)` but have no logger configured: nothing is written."
                " `Trainer(logger=True)` has one; `self.log(..., logger=False)` switches logging off for this value."
            )
        options = LogOptions(
            prog_bar=prog_bar,
            logger=logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduction(reduce_fx),
            enable_graph=enable_graph,
            sync_dist=sync_dist,
            sync_dist_group=sync_dist_group,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            metric_attribute=metric_attribute or self._metric_attribute(value),
            rank_zero_only=rank_zero_only,
        )
        trainer.metric_log.log(self, name, value, options)  # pyright: ignore[reportArgumentType]  self is the module

    def log_dict(
        self,
        dictionary: Mapping[str, _METRIC] | MetricCollection,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Logs each value of ``dictionary`` (or of a ``MetricCollection``) as :meth:`log` does, with the same arguments."""
        if self._fabric is not None:
            self._log_dict_through_fabric(dictionary, logger=logger)
            return
        for name, value in _log_items(dictionary):
            self.log(
                name=name,
                value=value,
                prog_bar=prog_bar,
                logger=logger,
                on_step=on_step,
                on_epoch=on_epoch,
                reduce_fx=reduce_fx,
                enable_graph=enable_graph,
                sync_dist=sync_dist,
                sync_dist_group=sync_dist_group,
                add_dataloader_idx=add_dataloader_idx,
                batch_size=batch_size,
                rank_zero_only=rank_zero_only,
            )

    def _log_dict_through_fabric(self, dictionary: Mapping[str, _METRIC] | MetricCollection, logger: bool | None = None) -> None:
        if logger is False:
            return
        assert self._fabric is not None
        metrics = dict(_log_items(dictionary))
        if any(isinstance(value, dict) for value in metrics.values()):
            raise ValueError(
                f"`self.log_dict({dictionary})` was called, but nested dictionaries cannot be logged: one level of names"
            )
        for name, value in metrics.items():
            check_value(name, value)
            if is_metric(value):
                raise ValueError(
                    f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged with Fabric: "
                    "log the result of its `compute()`"
                )
        self._fabric.log_dict(metrics=metrics)

    def _metric_attribute(self, value: Any) -> str | None:
        """The name under which this module holds a logged ``torchmetrics.Metric``."""
        if not is_metric(value):
            return None
        if self._metric_attributes is None or id(value) not in self._metric_attributes:
            self._metric_attributes = {id(m): name for name, m in self.named_modules() if is_metric(m)}
        if not self._metric_attributes:
            raise MisconfigurationException(
                "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged."
                " A metric that the module does not have is neither moved nor saved nor reset with it: assign it in"
                " `__init__`, `self.accuracy = Accuracy(...)`."
            )
        name = self._metric_attributes.get(id(value))
        if name is None:
            raise MisconfigurationException(
                "Could not find the `LightningModule` attribute for the `torchmetrics.Metric` logged."
                " Say under which name the module has it: `self.log(..., metric_attribute=name)`; its metrics are"
                f" {list(self._metric_attributes.values())}"
            )
        return name


def _log_items(dictionary: Mapping[str, Any] | MetricCollection) -> list[tuple[str, Any]]:
    if is_collection(dictionary):
        # The compute groups' members must stay separate states, because each is reset and computed on its own.
        return list(dictionary.items(keep_base=False, copy_state=False))
    if not isinstance(dictionary, Mapping):
        raise TypeError(
            f"`self.log_dict` expects a mapping of names to values, found {type(dictionary).__name__}: {dictionary!r}."
        )
    return list(dictionary.items())
