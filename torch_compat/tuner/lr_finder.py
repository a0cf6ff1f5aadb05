"""The learning rate range test (Smith, https://arxiv.org/abs/1506.01186): train with a growing rate and watch the loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.optimizer_names import check_rates
from torch_compat.run.states import RunningStage
from torch_compat.tuner.trial import fit_loop_of_a_trial, trial
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.parsing import lightning_hasattr, lightning_setattr
from torch_compat.utilities.rank_zero import LOGGER_NAME, rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

log = logging.getLogger(f"{LOGGER_NAME}.tuner.lr_finder")

_SMOOTHING = 0.98  # weight of the past in the averaged loss


class _LRFinder:
    """The result of a range test.

    Attributes:
        results: ``{"lr": [...], "loss": [...]}``: learning rate and averaged loss of each step.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        if mode not in ("linear", "exponential"):
            raise ValueError(f"mode={mode!r}: expected 'linear' or 'exponential'")
        self.mode = mode
        self.lr_min = lr_min
        self.lr_max = lr_max
        self.num_training = num_training
        self.results: dict[str, Any] = {}
        self._total_batch_idx = 0
        self._optimal_idx: int | None = None

    def rate(self, step: int) -> float:
        """The learning rate of step ``step`` of the test."""
        if step == 0:
            return self.lr_min
        part = (step + 1) / self.num_training
        if self.mode == "linear":
            return self.lr_min + part * (self.lr_max - self.lr_min)
        return self.lr_min * (self.lr_max / self.lr_min) ** part

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The learning rate at which the loss falls most steeply, or None if there are too few finite losses.

        Args:
            skip_begin: so many steps at the beginning are left out.
            skip_end: so many at the end.
        """
        losses = torch.tensor(self.results["loss"][skip_begin:-skip_end])
        rates = torch.tensor(self.results["lr"][skip_begin:-skip_end])
        finite = torch.isfinite(losses)
        if int(finite.sum()) < 2:
            log.error(
                "Failed to compute suggestion for learning rate because there are not enough points: fewer than two finite"
                f" losses beside the first {skip_begin} and the last {skip_end}, which do not count. Raise `num_training`, or"
                " give it more batches."
            )
            self._optimal_idx = None
            return None
        slopes = torch.gradient(losses[finite], spacing=[rates[finite]])[0]
        position = torch.arange(len(losses))[finite][slopes.argmin()]
        self._optimal_idx = int(position) + skip_begin
        return self.results["lr"][self._optimal_idx]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Plots losses over learning rates with matplotlib, and gives the figure.

        Args:
            suggest: mark the suggestion.
            show: show the figure.
            ax: axes to draw into; default: new ones.

        Raises:
            MisconfigurationException: matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ModuleNotFoundError as error:
            raise MisconfigurationException(
                "To use the `plot` method, you must have Matplotlib installed: pip install matplotlib"
            ) from error
        if ax is None:
            figure, ax = plt.subplots()
        else:
            figure = ax.figure
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("Learning rate")
        ax.set_ylabel("Loss")
        if suggest:
            self.suggestion()
            if self._optimal_idx is not None:
                index = self._optimal_idx
                ax.plot(self.results["lr"][index], self.results["loss"][index], markersize=10, marker="o", color="red")
        if show:
            plt.show()
        return figure


class _RangeTest(Callback):
    """Sets the learning rate of each step, and averages its loss."""

    def __init__(self, finder: _LRFinder, early_stop_threshold: float | None, first_step: int, show: bool) -> None:
        self._finder = finder
        self._threshold = early_stop_threshold
        self._first_step = first_step
        self._average = 0.0
        self._best = math.nan
        self._bar = tqdm(desc="Finding best initial lr", total=finder.num_training, disable=not show)
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        rate = self._finder.rate(trainer.global_step - self._first_step)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = rate
        if _steps(trainer, batch_idx):
            self.rates.append(rate)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not _steps(trainer, batch_idx):
            return
        if not outputs:  # a step that returned None: a rate without a loss, which counts for no suggestion
            self.losses.append(float("nan"))
            return
        self._bar.update()
        step = trainer.global_step
        loss = (outputs["loss"] if isinstance(outputs, Mapping) else outputs).item()
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * loss
        smoothed = self._average / (1 - _SMOOTHING ** (step + 1))
        diverges = self._threshold is not None and step > 1 and smoothed > self._threshold * self._best
        if trainer.strategy.reduce_boolean_decision(diverges, all=False):
            trainer.should_stop = True
        if step == 1 or not smoothed >= self._best:
            self._best = smoothed
        self.losses.append(smoothed)

    def close(self) -> None:
        self._bar.close()


def _steps(trainer: Trainer, batch_idx: int) -> bool:
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def lr_find(
    trainer: Trainer,
    model: LightningModule,
    min_lr: float = 1e-8,
    max_lr: float = 1,
    num_training: int = 100,
    mode: str = "exponential",
    early_stop_threshold: float | None = 4.0,
    update_attr: bool = False,
    attr_name: str = "",
) -> _LRFinder | None:
    """Run a range test inside of a fit whose optimizers are set up; see :meth:`torch_compat.tuner.Tuner.lr_find`.

    Raises:
        AttributeError: neither the model nor its hparams have an attribute for the rate.
        MisconfigurationException: there is not exactly one optimizer, or it has no learning rate.
    """
    if trainer.fast_dev_run:
        rank_zero_warn("Skipping learning rate finder since `fast_dev_run` is enabled.")
        return None
    if update_attr:
        attr_name = _attribute(model, attr_name)
    if len(trainer.optimizers) != 1:
        raise MisconfigurationException(
            f"`model.configure_optimizers()` returned {len(trainer.optimizers)} optimizers, but learning rate finder only works"
            " with single optimizer"
        )
    check_rates("LearningRateFinder", trainer.optimizers)
    finder = _LRFinder(mode, min_lr, max_lr, num_training)
    first_step = trainer.global_step
    test = _RangeTest(finder, early_stop_threshold, first_step, show=trainer.progress_bar_callback is not None)
    with trial(trainer, [test]):
        trainer.lr_scheduler_configs = []
        trainer.limit_val_batches = num_training
        trainer.should_stop = False
        trainer.state.stage = RunningStage.TRAINING
        loop = fit_loop_of_a_trial(trainer, first_step + num_training, goes_on=True)
        try:
            loop.run()
        finally:
            test.close()
            loop.data.close()
    trainer.validate_loop.source.combined = trainer.fit_loop.source.combined = None
    trainer.fit_loop.setup_data()
    steps = loop.progress.global_step - first_step
    if steps != num_training:
        log.info(f"LR finder stopped early after {steps} steps due to diverging loss.")
    finder.results = trainer.strategy.broadcast({"lr": test.rates, "loss": test.losses})
    finder._total_batch_idx = loop.progress.total_batch - 1
    if update_attr:
        _use(trainer, model, attr_name, finder.suggestion())
    return finder


def _use(trainer: Trainer, model: LightningModule, attr_name: str, rate: float | None) -> None:
    if rate is None:
        return
    lightning_setattr(model, attr_name, rate)
    for group in trainer.optimizers[0].param_groups:
        group["lr"] = rate
    log.info(f"Learning rate set to {rate}")


def _attribute(model: LightningModule, attr_name: str) -> str:
    """The name of the attribute that holds the learning rate.

    Raises:
        AttributeError: there is none.
    """
    if attr_name:
        if not lightning_hasattr(model, attr_name):
            raise AttributeError(
                f"The attribute name for the learning rate was set to {attr_name}, but neither the model nor its hparams have"
                " that attribute, which the rate found is assigned to."
            )
        return attr_name
    for name in ("lr", "learning_rate"):
        if lightning_hasattr(model, name):
            return name
    raise AttributeError(
        "When using the learning rate finder, either `model` or `model.hparams` should have `lr` or `learning_rate`,"
        " which the rate is assigned to: pass the name that configure_optimizers reads as `attr_name`."
    )
