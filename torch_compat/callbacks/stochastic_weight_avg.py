"""``StochasticWeightAveraging``: the mean of the weights of the last epochs, trained at a constant learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import SWALR, get_swa_avg_fn

from torch_compat.callbacks.averaged_weights import AveragedWeights, AveragingRule, current_weights
from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

_CPU = torch.device("cpu")


class StochasticWeightAveraging(Callback):
    """Stochastic weight averaging (Izmailov et al., https://arxiv.org/abs/1803.05407).

    From ``swa_epoch_start`` on, learning rates are annealed to ``swa_lrs``, and the weights at the beginning of each epoch are
    averaged. After the last epoch the module gets the averages. If it has batch norm layers, one more epoch without learning
    computes their statistics; as in Lightning, the last batch of that epoch takes an optimizer step with the gradients of the
    last training batch.

    Averages live where the parameters live, sharded like them, so sharded models are averaged too.

    ::

        averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.5)
        pl.Trainer(max_epochs=4, callbacks=[averaging]).fit(module, loader)

    Args:
        swa_lrs: learning rate to anneal to: one, or one for each param group.
        swa_epoch_start: when it starts: an epoch, counted from 1, or a fraction of ``max_epochs``.
        annealing_epochs: how many epochs the annealing takes.
        annealing_strategy: "cos" or "linear".
        avg_fn: ``(averaged, current, num_averaged) -> averaged``, for each tensor; default: equally weighted.
        device: for Lightning's signature; averages stay where the parameters are, whatever it names.

    Raises:
        MisconfigurationException: an argument out of range; several optimizers or schedulers; precision "16-mixed" with batch
            norm layers (when ``fit`` starts).

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.StochasticWeightAveraging.html
    """

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        device: torch.device | str | None = _CPU,
    ) -> None:
        _check(swa_lrs, swa_epoch_start, avg_fn, device)
        self._swa_epoch_start = swa_epoch_start
        self._swa_lrs = swa_lrs
        self._annealing_epochs = annealing_epochs
        self._annealing_strategy: Literal["cos", "linear"] = annealing_strategy
        self._avg_fn = avg_fn or self.avg_fn
        self._max_epochs = 0
        self._batch_norms: list[_BatchNorm] = []
        self._momenta: dict[_BatchNorm, float | None] = {}
        self._accumulate_grad_batches = 1
        self._weights: AveragedWeights | None = None
        self._scheduler: SWALR | None = None
        self._latest_update_epoch = -1
        self._restored: dict[str, Any] = {}

    @property
    def swa_start(self) -> int:
        """The first epoch whose initial weights are averaged, counted from 0."""
        assert isinstance(self._swa_epoch_start, int)
        return max(self._swa_epoch_start - 1, 0)

    @property
    def swa_end(self) -> int | float:
        """The last epoch whose initial weights are averaged, counted from 0."""
        return float("inf") if self._max_epochs == -1 else self._max_epochs - 1

    @property
    def n_averaged(self) -> Tensor | None:
        """The number of averages taken of the weights, int64 scalar; None before ``fit``."""
        return None if self._weights is None else torch.tensor(self._weights.count)

    @staticmethod
    def avg_fn(averaged_model_parameter: Tensor, model_parameter: Tensor, num_averaged: Tensor) -> Tensor:
        """The equally weighted mean."""
        return get_swa_avg_fn()(averaged_model_parameter, model_parameter, num_averaged)

    @staticmethod
    def pl_module_contains_batch_norm(pl_module: LightningModule) -> bool:
        """Whether there are statistics to compute."""
        return any(isinstance(module, _BatchNorm) for module in pl_module.modules())

    # -- the run -------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise MisconfigurationException(f"SWA currently works with 1 `optimizer`, found {len(trainer.optimizers)}")
        if len(trainer.lr_scheduler_configs) > 1:
            raise MisconfigurationException(
                f"SWA currently not supported for more than 1 `lr_scheduler`, which it replaces; "
                f"found {len(trainer.lr_scheduler_configs)}"
            )
        assert trainer.max_epochs is not None
        if isinstance(self._swa_epoch_start, float):
            if trainer.max_epochs == -1:
                raise MisconfigurationException(
                    "SWA with `swa_epoch_start` as a float is not supported when `max_epochs=-1`: of how many epochs is it "
                    f"{self._swa_epoch_start}? Give the number of the first epoch as an int."
                )
            self._swa_epoch_start = int(trainer.max_epochs * self._swa_epoch_start)
        self._max_epochs = trainer.max_epochs
        self._batch_norms = [module for module in pl_module.modules() if isinstance(module, _BatchNorm)]
        if self._batch_norms:
            if trainer.scaler is not None:
                raise MisconfigurationException(
                    "StochasticWeightAveraging of a module with batch norm layers takes an optimizer step with gradients of an"
                    " earlier batch, whose loss scale is gone: use precision='bf16-mixed' instead of '16-mixed'."
                )
            if self._max_epochs != -1:
                trainer.fit_loop.max_epochs = self._max_epochs + 1  # one more, for the statistics
        if self._restored.get("scheduler_state") is not None:
            # SWA's scheduler had taken the place of the module's own when the checkpoint was saved, and will take it again.
            trainer.lr_scheduler_configs.clear()
        self._weights = AveragedWeights([name for name, _ in pl_module.named_parameters()], AveragingRule(self._avg_fn))
        self._weights.start(current_weights(trainer), self._restored.get("average_model_state") or {})
        self._weights.count = self._restored.get("n_averaged", 0)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._weights is not None
        epoch = trainer.current_epoch
        averaging = self.swa_start <= epoch <= self.swa_end
        if averaging and self._scheduler is None:
            self._start_annealing(trainer)
        if averaging and epoch > self._latest_update_epoch:
            self._weights.update(current_weights(trainer))
            self._latest_update_epoch = epoch
        if epoch == self.swa_end + 1:
            self._weights.copy_to(current_weights(trainer))
            self._start_statistics(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._batch_norms and trainer.current_epoch == self.swa_end and trainer.is_last_batch:
            trainer.executor.keep_gradients(True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from torch_compat.run.hook_calls import is_overridden

        if (
            self._batch_norms
            and not trainer.fit_loop._skip_backward
            and trainer.state.fn == "fit"
            and not is_overridden("on_validation_model_zero_grad", pl_module)
        ):
            trainer.executor.forget_gradients()  # as that hook does by default

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop._skip_backward:
            trainer.fit_loop._skip_backward = False
        elif self._batch_norms:
            trainer.executor.keep_gradients(False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._weights is not None
        last = trainer.current_epoch - 1
        if self._batch_norms and last == self.swa_end + 1:
            self._end_statistics(trainer)
        elif last == self.swa_end:
            self._weights.copy_to(current_weights(trainer))

    def _start_annealing(self, trainer: Trainer) -> None:
        """Put SWA's scheduler in place of the module's."""
        from torch_compat.utilities.types import LRSchedulerConfig

        optimizer = trainer.optimizers[0]
        rates = self._swa_lrs if isinstance(self._swa_lrs, list) else [self._swa_lrs] * len(optimizer.param_groups)
        for rate, group in zip(rates, optimizer.param_groups, strict=False):
            group["initial_lr"] = rate
        self._scheduler = SWALR(
            optimizer,
            swa_lr=rates,  # pyright: ignore[reportArgumentType]  one for each group is documented
            anneal_epochs=self._annealing_epochs,
            anneal_strategy=self._annealing_strategy,
            # Lightning's choice: "cos" begins where a scheduler of that many epochs would be.
            last_epoch=trainer.max_epochs or 0 if self._annealing_strategy == "cos" else -1,
        )
        if (state := self._restored.get("scheduler_state")) is not None:
            self._scheduler.load_state_dict(state)
        elif trainer.current_epoch != self.swa_start:
            rank_zero_warn(
                "SWA is initializing after swa_start without any checkpoint data, as where a checkpoint of a run without this"
                " callback was loaded. The averages begin with the present weights."
            )
        self._install_scheduler(trainer, LRSchedulerConfig(self._scheduler))

    def _install_scheduler(self, trainer: Trainer, config: Any) -> None:
        if not trainer.lr_scheduler_configs:
            trainer.lr_scheduler_configs.append(config)
            return
        replaced = trainer.lr_scheduler_configs[0]
        if replaced.interval != "epoch" or replaced.frequency != 1:
            rank_zero_warn(f"SWA is currently only supported every epoch. Found {replaced}")
        rank_zero_info(f"Swapping scheduler `{type(replaced.scheduler).__name__}` for `{type(self._scheduler).__name__}`")
        trainer.lr_scheduler_configs[0] = config

    # -- the statistics of batch norm layers ---------------------------------------------------------------------------

    def _start_statistics(self, trainer: Trainer) -> None:
        if trainer.fit_loop.max_batches == float("inf"):
            raise AssertionError(
                "Iterable-style datasets are not supported: the statistics of batch norm layers are computed over an epoch of a "
                "known number of batches. Pass limit_train_batches=<an int>, or a dataset with a length"
            )
        self._reset_batch_norms()
        trainer.fit_loop.max_batches += 1
        self._accumulate_grad_batches = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = int(trainer.fit_loop.max_batches)
        if trainer.lightning_module.automatic_optimization:
            trainer.fit_loop._skip_backward = True

    @torch.no_grad()
    def _reset_batch_norms(self) -> None:
        self._momenta = {}
        for module in self._batch_norms:
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.zero_()
                module.running_var.fill_(1)
            self._momenta[module] = module.momentum
            module.momentum = None  # a plain mean over batches
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.zero_()

    def _end_statistics(self, trainer: Trainer) -> None:
        trainer.accumulate_grad_batches = self._accumulate_grad_batches
        trainer.fit_loop.max_batches -= 1
        assert trainer.fit_loop.max_epochs is not None
        trainer.fit_loop.max_epochs -= 1
        for module, momentum in self._momenta.items():
            module.momentum = momentum

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "n_averaged": 0 if self._weights is None else self._weights.count,
            "latest_update_epoch": self._latest_update_epoch,
            "scheduler_state": None if self._scheduler is None else self._scheduler.state_dict(),
            "average_model_state": None if self._weights is None else self._weights.tensors(),
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("callbacks", {}).get(self.state_key) or {}
        if state.get("scheduler_state") is not None:
            checkpoint["lr_schedulers"] = []  # they were SWA's, which has their state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict)
        self._latest_update_epoch = state_dict["latest_update_epoch"]


def _check(swa_lrs: Any, swa_epoch_start: Any, avg_fn: Any, device: Any) -> None:
    number = isinstance(swa_epoch_start, int | float) and not isinstance(swa_epoch_start, bool)
    whole = isinstance(swa_epoch_start, int)
    if not number or (swa_epoch_start < 1 if whole else not 0 <= swa_epoch_start <= 1):
        raise MisconfigurationException(
            f"swa_epoch_start should be a >0 integer or a float between 0 and 1, a part of all epochs; found {swa_epoch_start!r}"
        )
    rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
    if not all(isinstance(rate, float) and rate > 0 for rate in rates):
        raise MisconfigurationException(
            f"The `swa_lrs` should be a positive float, or a list of positive floats, one for each param group; found {swa_lrs!r}"
        )
    if avg_fn is not None and not callable(avg_fn):
        raise MisconfigurationException("The `avg_fn` should be callable.")
    if device is not None and not isinstance(device, torch.device | str):
        raise MisconfigurationException(f"device is expected to be a torch.device or a str. Found {device!r}")
    if device is not None:
        torch.device(device)  # a misspelt one is an error
