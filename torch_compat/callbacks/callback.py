"""``Callback``: the base class whose hooks the trainer calls around every part of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.types import STEP_OUTPUT


class Callback:
    """Self-contained behaviour that is added to a run: ``Trainer(callbacks=[...])``.

    ::

        class Losses(pl.Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                trainer.print(batch_idx, float(outputs["loss"]))

        trainer.callbacks.append(Losses())
        trainer.fit(module, loader)

    Override the hooks that you need. The trainer binds, once per run, only the hooks that a callback overrides, so a hook
    left alone costs nothing per step. Hooks run on the host, on every process, with real values.

    ``on_before_backward``, ``on_after_backward``, ``on_before_optimizer_step`` and ``on_before_zero_grad`` see real gradients;
    overriding one splits the compiled step between the backward pass and the update.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.Callback.html
    """

    @property
    def state_key(self) -> str:
        """Key of this callback's state in ``checkpoint["callbacks"]``.

        Two instances of one class need different keys if both have state: see ``_generate_state_key``.
        """
        return type(self).__qualname__

    @property
    def _legacy_state_key(self) -> type[Callback]:
        """The key that checkpoints older than Lightning 1.5 used."""
        return type(self)

    def _generate_state_key(self, **kwargs: Any) -> str:
        """A ``state_key`` made of the class name and of the ``repr`` of the arguments that tell instances apart."""
        return f"{type(self).__qualname__}{kwargs!r}"

    # -- the run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """First hook of a run; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Last hook of a run, with the ``stage`` that ``setup`` had."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called once when ``fit`` starts, before the sanity check."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called once when ``fit`` ends, after ``on_train_end``."""

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the validation batches that ``fit`` runs as a check before training."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the sanity check."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Called when any exception, ``KeyboardInterrupt`` included, leaves a run."""

    # -- training ------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the sanity check and before the first epoch."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first batch of an epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last batch of an epoch and after validation; ``trainer.callback_metrics`` holds the epoch's
        metrics."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Called before a training step."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Called after a training step; ``outputs["loss"]`` is the returned loss divided by ``accumulate_grad_batches``."""

    # -- validation, test, prediction ----------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before a validation run."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after a validation run."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation step."""

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a validation step."""

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before a test run."""

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after a test run."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test step."""

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a test step."""

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before a prediction run."""

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after a prediction run."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the last prediction batch."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a prediction step."""

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Called after a prediction step; ``outputs`` are this process's rows."""

    # -- inside the step -----------------------------------------------------------------------------------------------

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Called before the backward pass with the loss that it starts from."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called after the backward pass, when ``p.grad`` of every parameter can be read and changed."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Called before an update (not after every microbatch), before gradients are clipped."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Called before gradients are reset."""

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state to save under ``checkpoint["callbacks"][self.state_key]``; an empty dict saves nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what ``state_dict`` gave."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called with the whole checkpoint before it is written; it may be changed in place."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called with the whole checkpoint before any of it is restored."""
