"""``RichProgressBar``: progress bars of the rich package."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from rich import get_console, reconfigure
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from torch import Tensor

from torch_compat.callbacks.progress.drawn_bar import DrawnBar
from torch_compat.callbacks.progress.progress_bar import COMPILING
from torch_compat.callbacks.progress.rich_columns import (
    BatchesProcessedColumn,
    CustomTimeColumn,
    MetricsTextColumn,
    ProcessingSpeedColumn,
)
from torch_compat.callbacks.progress.rich_theme import RichProgressBarTheme
from torch_compat.utilities.rank_zero import LOGGER_NAME

if TYPE_CHECKING:
    from rich.console import Console

    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.types import STEP_OUTPUT

__all__ = ["RichProgressBar", "RichProgressBarTheme"]

_DRAWS_PER_SECOND = 10


def _task_of(name: str, task_id: str) -> Any:
    """A property of the task of a bar, which is there once its stage has started; TypeError before."""
    return property(lambda bars: bars._task(getattr(bars, task_id), name), doc="The task of the bar; TypeError before its stage.")


class RichProgressBar(DrawnBar):
    """Progress bars drawn with rich: description, bar, batches, elapsed and remaining time, steps per second, metrics.

    While a step is compiled the bar says so; the time for the first one is left out of speed and remaining time. Drawing waits
    for the device to give the metrics' values, so bars are drawn at most ten times a second; the last batch is always drawn.

    Args:
        refresh_rate: draw at most that many times per second (above 10 as 10); 0 hides the bars.
        leave: keep the bar of each finished epoch.
        theme: styles.
        console_kwargs: for ``rich.reconfigure``, which sets up rich's global console.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.RichProgressBar.html
    """

    def __init__(
        self,
        refresh_rate: int = 100,
        leave: bool = False,
        theme: RichProgressBarTheme = RichProgressBarTheme(),  # noqa: B008 - Lightning's default, never changed
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(refresh_rate)
        self.theme = theme
        self.progress: Progress | None = None
        self._progress_stopped = False
        self.train_progress_bar_id: TaskID | None = None
        self.val_sanity_progress_bar_id: TaskID | None = None
        self.val_progress_bar_id: TaskID | None = None
        self.test_progress_bar_id: TaskID | None = None
        self.predict_progress_bar_id: TaskID | None = None
        self._leave = leave
        self._console: Console | None = None
        self._console_kwargs = console_kwargs or {}
        self._last_draw = -math.inf
        self._shows_compiling = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "progress": None, "_console": None}  # both hold locks

    train_progress_bar: Task = _task_of("train_progress_bar", "train_progress_bar_id")
    val_sanity_check_bar: Task = _task_of("val_sanity_check_bar", "val_sanity_progress_bar_id")
    val_progress_bar: Task = _task_of("val_progress_bar", "val_progress_bar_id")
    test_progress_bar: Task = _task_of("test_progress_bar", "test_progress_bar_id")

    def _task(self, task_id: TaskID | None, name: str) -> Task:
        if self.progress is None or task_id is None:
            raise TypeError(f"`{type(self).__name__}.{name}` is not there before its stage has started.")
        return self.progress.tasks[self.progress.task_ids.index(task_id)]

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """The columns before the metrics; override it to choose others."""
        return [
            TextColumn("[progress.description]{task.description}"),
            BarColumn(
                complete_style=self.theme.progress_bar,
                finished_style=self.theme.progress_bar_finished,
                pulse_style=self.theme.progress_bar_pulse,
            ),
            BatchesProcessedColumn(style=self.theme.batch_progress),
            CustomTimeColumn(style=self.theme.time),
            ProcessingSpeedColumn(style=self.theme.processing_speed),
        ]

    # -- the display ---------------------------------------------------------------------------------------------------

    def _init_progress(self, trainer: Trainer) -> None:
        if self.is_disabled or self._is_drawn:
            return
        self._reset_progress_bar_ids()
        reconfigure(**self._console_kwargs)
        self._console = get_console()
        # No refresh thread: bars are drawn after batches, when metrics can be read.
        columns = [*self.configure_columns(trainer), MetricsTextColumn(style=self.theme.metrics)]
        self.progress = Progress(*columns, auto_refresh=False, console=self._console)
        self.progress.start()
        self._progress_stopped = False

    def _reset_progress_bar_ids(self) -> None:
        self.train_progress_bar_id = self.val_sanity_progress_bar_id = self.val_progress_bar_id = None
        self.test_progress_bar_id = self.predict_progress_bar_id = None

    @property
    def _is_drawn(self) -> bool:
        """Whether the bars are on the screen and move; those of a run that is over can still be read."""
        return self.progress is not None and not self._progress_stopped

    def _stop_progress(self) -> None:
        if self.progress is not None and self._is_drawn:
            self.progress.stop()
            self._progress_stopped = True

    def refresh(self, hard: bool = False) -> None:
        """Draws the bars; ``hard`` even if that was done less than ``1 / refresh_rate`` seconds ago."""
        if self.progress is not None and self._is_drawn and (hard or self._due()):
            self.progress.refresh()

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._last_draw < 1 / min(self.refresh_rate, _DRAWS_PER_SECOND):
            return False
        self._last_draw = now
        return True

    def _add_task(self, total_batches: float, description: str, visible: bool = True) -> TaskID:
        assert self.progress is not None
        text = f"[{self.theme.description}]{escape(description)}" if self.theme.description else escape(description)
        return self.progress.add_task(text, total=_finite(total_batches), visible=visible, metrics="")

    def _hide(self, task_id: TaskID | None) -> None:
        if self.progress is not None and task_id is not None:
            self.progress.update(task_id, advance=0, visible=False)
            self.refresh()

    def _update(self, progress_bar_id: TaskID | None, current: int, visible: bool = True, hard: bool = False) -> bool:
        """Moves a bar at once, and draws it where that is due; whether it was drawn."""
        if self.progress is None or progress_bar_id is None or self.is_disabled:
            return False
        self.progress.update(progress_bar_id, completed=current, visible=visible)
        if not (hard or self._shows_compiling or current == self._task(progress_bar_id, "bar").total or self._due()):
            return False
        self._shows_compiling = False
        self._show(progress_bar_id, "")
        return True

    def _show(self, task_id: TaskID, text: str) -> None:
        """Draws the bars with ``text`` behind one of them: no step of the bar, so ``Progress.update`` is not called."""
        if self.progress is not None:
            self._task(task_id, "bar").fields["metrics"] = text
            self.progress.refresh()

    def _update_metrics(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_disabled or self.progress is None:
            return
        text = self._metrics_text(trainer, pl_module)
        if self.train_progress_bar_id is not None:
            self._show(self.train_progress_bar_id, text)

    def _metrics_text(self, trainer: Trainer, pl_module: LightningModule) -> str:
        return self.theme.metrics_text_delimiter.join(
            f"{name}: {self._format(value)}" for name, value in self.get_metrics(trainer, pl_module).items()
        )

    def _format(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        try:
            return format(value, self.theme.metrics_format)
        except (TypeError, ValueError):  # not a number
            return str(value)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, int | str | float | dict[str, float]]:
        items: dict[str, Any] = super().get_metrics(trainer, pl_module)
        return {name: value.item() if isinstance(value, Tensor) else value for name, value in items.items()}

    def _get_train_description(self, current_epoch: int) -> str:
        last = "" if self.trainer.max_epochs is None else f"/{self.trainer.max_epochs - 1}"
        # As wide as the validation bar's, which comes and goes below.
        return f"Epoch {current_epoch}{last}".ljust(len(self.validation_description))

    # -- training ------------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._init_progress(trainer)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hide(self.val_sanity_progress_bar_id)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._init_progress(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_disabled:
            return
        if self.train_progress_bar_id is not None and self._leave:
            self._stop_progress()
            self._init_progress(trainer)
        if self.train_progress_bar_id is None:
            self._initialize_train_progress_bar_id()
        elif self.progress is not None:
            description, total = self._get_train_description(trainer.current_epoch), _finite(self.total_train_batches)
            self.progress.reset(self.train_progress_bar_id, total=total, description=description, visible=True)
            self.train_progress_bar.total = total  # None, too, which `reset` takes for no change
        self.refresh(hard=True)

    def _initialize_train_progress_bar_id(self) -> None:
        description = self._get_train_description(self.trainer.current_epoch)
        self.train_progress_bar_id = self._add_task(self.total_train_batches, description)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if self.progress is not None and self.is_enabled and self.train_progress_bar_id is None:
            self._initialize_train_progress_bar_id()  # a run that goes on inside of an epoch
        if self._update(self.train_progress_bar_id, batch_idx + 1):
            self._update_metrics(trainer, pl_module)

    def announce(self, text: str) -> None:
        if self._console is None or not self._console.is_terminal:
            super().announce(text)
        elif logging.getLogger(LOGGER_NAME).isEnabledFor(logging.INFO):
            self._console.print(text, highlight=False, markup=False)  # above the bars

    def show_compiling(self, compiling: bool) -> None:
        task_id = self._task_of_stage()
        if compiling and self.progress is not None and self._is_drawn and not self._shows_compiling and task_id is not None:
            self._shows_compiling = True
            self._task(task_id, "bar").visible = True
            self._show(task_id, COMPILING)

    def _task_of_stage(self) -> TaskID | None:
        stage = self.trainer.state.stage
        return {
            "train": self.train_progress_bar_id,
            "sanity_check": self.val_sanity_progress_bar_id,
            "validate": self.val_progress_bar_id,
            "test": self.test_progress_bar_id,
            "predict": self.predict_progress_bar_id,
        }.get("" if stage is None else stage.value)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._update_metrics(trainer, pl_module)

    # -- validation, test, prediction ----------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._init_progress(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_enabled and trainer.state.fn == "fit":
            self._hide(self.val_progress_bar_id)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._update_metrics(trainer, pl_module)
        self.reset_dataloader_idx_tracker()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._init_progress(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reset_dataloader_idx_tracker()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._init_progress(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reset_dataloader_idx_tracker()

    def _batch_start(self, trainer: Trainer, stage: str, dataloader_idx: int) -> None:
        if self.is_enabled:
            super()._batch_start(trainer, stage, dataloader_idx)

    def _start_loader(self, trainer: Trainer, stage: str, dataloader_idx: int) -> None:
        if stage == "val" and trainer.sanity_checking:
            self._hide(self.val_sanity_progress_bar_id)
            total = self.total_val_batches_current_dataloader
            self.val_sanity_progress_bar_id = self._add_task(total, self.sanity_check_description, visible=False)
        elif stage == "val":
            self._hide(self.val_progress_bar_id)
            total = self.total_val_batches_current_dataloader
            self.val_progress_bar_id = self._add_task(total, self.validation_description, visible=False)
        elif stage == "test":
            self._hide(self.test_progress_bar_id)
            self.test_progress_bar_id = self._add_task(self.total_test_batches_current_dataloader, self.test_description)
            self.refresh(hard=True)
        else:
            self._hide(self.predict_progress_bar_id)
            total = self.total_predict_batches_current_dataloader
            self.predict_progress_bar_id = self._add_task(total, self.predict_description)
            self.refresh(hard=True)

    def _advance_to(self, trainer: Trainer, stage: str, done: int) -> None:
        if stage == "val" and trainer.sanity_checking:
            task_id = self.val_sanity_progress_bar_id
        else:
            task_id = {"val": self.val_progress_bar_id, "test": self.test_progress_bar_id}.get(
                stage, self.predict_progress_bar_id
            )
        self._update(task_id, done)

    # -- the end -------------------------------------------------------------------------------------------------------

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_progress()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_progress()


def _finite(total: float) -> float | None:
    """``total``, or None for an unknown one."""
    return total if math.isfinite(total) else None
