"""``ProgressBar``: the base class of progress bars."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.callback import Callback
from torch_compat.loggers.utilities import combined_version
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

COMPILING = "compiling…"


class ProgressBar(Callback):
    """Base class of progress bars: totals per stage, the metrics to show, and where to print.

    A subclass gives ``enable`` and ``disable``, overrides the hooks that move its bar, and calls ``super().__init__()``. The bar
    is disabled on every process but 0. ``get_metrics`` reads device values: call it only when the bar is about to be drawn.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.ProgressBar.html
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._current_eval_dataloader_idx: int | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer of the run; TypeError before ``setup``."""
        if self._trainer is None:
            raise TypeError(f"`{type(self).__name__}.trainer` is not there before a run has started (it is set in `setup`).")
        return self._trainer

    @property
    def sanity_check_description(self) -> str:
        """The text before the bar of the sanity check."""
        return "Sanity Checking"

    @property
    def train_description(self) -> str:
        """The text before the training bar until the first epoch starts."""
        return "Training"

    @property
    def validation_description(self) -> str:
        """The text before the validation bar."""
        return "Validation"

    @property
    def test_description(self) -> str:
        """The text before the test bar."""
        return "Testing"

    @property
    def predict_description(self) -> str:
        """The text before the prediction bar."""
        return "Predicting"

    @property
    def total_train_batches(self) -> int | float:
        """Training batches of the current epoch, or what is left of ``max_steps`` when only that bounds the run; inf if
        unknown."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps is not None and trainer.max_steps > 0:
            return min(trainer.num_training_batches, trainer.max_steps - trainer.global_step)
        return trainer.num_training_batches

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Validation (or sanity check) batches of the current dataloader; inf if unknown."""
        trainer = self.trainer
        return self._of_current_dataloader(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Test batches of the current dataloader; inf if unknown."""
        return self._of_current_dataloader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Prediction batches of the current dataloader; inf if unknown."""
        return self._of_current_dataloader(self.trainer.num_predict_batches)

    @property
    def total_val_batches(self) -> int | float:
        """Validation batches of all dataloaders in this epoch; 0 if this epoch has no validation, inf if unknown."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        if not trainer.enable_validation or (every is not None and (trainer.current_epoch + 1) % every != 0):
            return 0
        batches = trainer.num_val_batches
        return sum(batches) if isinstance(batches, list) else batches

    def _of_current_dataloader(self, batches: int | float | list[int] | list[float] | list[int | float]) -> int | float:
        if not isinstance(batches, list):
            return batches
        if self._current_eval_dataloader_idx is None:
            raise RuntimeError("There is no current dataloader: call `has_dataloader_changed(dataloader_idx)` first.")
        return batches[self._current_eval_dataloader_idx]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Whether ``dataloader_idx`` differs from that of the call before; remembers it."""
        previous, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return previous != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forgets the current dataloader."""
        self._current_eval_dataloader_idx = None

    def disable(self) -> None:
        """Hides the bar."""
        raise NotImplementedError(f"`{type(self).__name__}` must implement `disable()`, which hides the bar.")

    def enable(self) -> None:
        """Shows the bar again."""
        raise NotImplementedError(f"`{type(self).__name__}` must implement `enable()`, which shows the bar again.")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` that does not break the bar."""
        print(*args, **kwargs)

    def announce(self, text: str) -> None:
        """The trainer calls it with a line about the run (how its steps run), on process 0. Here it is logged, at level INFO."""
        rank_zero_info(text)

    def show_compiling(self, compiling: bool) -> None:
        """The trainer calls it with True when it starts to compile a step, which may take minutes, and with False afterwards.

        It comes between ``on_<stage>_batch_start`` and ``on_<stage>_batch_end`` of the first batch, and of later ones that need
        another program. Here it does nothing.
        """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, int | str | float | dict[str, float]]:
        """The items shown beside the bar: the logger's version as ``v_num`` and values logged with ``prog_bar=True``.

        Override it to add, rename or remove items. It is called when the bar is drawn, not at every step.
        """
        standard = get_standard_metrics(trainer)
        logged = trainer.progress_bar_metrics
        for name in standard.keys() & logged.keys():
            rank_zero_warn(
                f"`self.log({name!r}, ..., prog_bar=True)` hides the progress bar's own {name!r}. Log it under another name, or"
                f" override `{type(self).__name__}.get_metrics`."
            )
        return {**standard, **logged}


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """``{"v_num": version}`` of the trainer's loggers, the last four characters of a string version; empty without a version."""
    if not trainer.loggers:
        return {}
    version = combined_version(trainer.loggers)
    if version in ("", None):
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}
