"""``TQDMProgressBar``: progress bars of the tqdm package."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.progress.drawn_bar import DrawnBar
from torch_compat.callbacks.progress.progress_bar import COMPILING
from torch_compat.utilities.rank_zero import rank_zero_debug

# tqdm.auto draws a notebook widget, but warns at import when ipywidgets is missing.
if TYPE_CHECKING or importlib.util.find_spec("ipywidgets") is None:
    from tqdm import tqdm as _tqdm
else:
    from tqdm.auto import tqdm as _tqdm

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.types import STEP_OUTPUT

_NUMBER_WIDTH = 5


class Tqdm(_tqdm):
    """A tqdm bar whose numbers keep their width, and whose rate leaves out the time before ``restart_rate``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._rate_origin: tuple[float, float] | None = None
        self._last_draw = -math.inf
        super().__init__(*args, **kwargs)

    @staticmethod
    def format_num(n: float | str) -> str:
        """``n`` as tqdm writes it, with zeros added to floats and numeric strings, so that the bar does not flicker."""
        text = n if isinstance(n, str) else _tqdm.format_num(n)
        if not isinstance(n, (float, str)) or "e" in text:
            return text
        if "." not in text and len(text) < _NUMBER_WIDTH:
            try:
                float(text)
            except ValueError:
                return text
            text += "."
        return text.ljust(_NUMBER_WIDTH, "0")

    @property
    def format_dict(self) -> dict[str, Any]:
        """tqdm's numbers; rate, and with it the remaining time, are counted from the last ``restart_rate``."""
        values = dict(super().format_dict)
        if self._rate_origin is not None:
            done, since = values["n"] - self._rate_origin[0], time.monotonic() - self._rate_origin[1]
            if done > 0 and since > 0:
                values["rate"] = done / since
            elif values["n"] != values["total"]:
                values["rate"] = 0  # shown as "?"
        return values

    def restart_rate(self, done: int) -> None:
        """Count the rate from here on: the last of the steps done was compiled first, and says nothing about the next ones."""
        self._last_draw = time.monotonic()
        self._rate_origin = (done, self._last_draw)

    def restart(self, total: float | None) -> None:
        """Empties the bar for ``total`` new items; None if their number is unknown."""
        self._rate_origin = None
        self._last_draw = -math.inf
        self.reset()
        self.total = total
        self.initial = 0

    def due(self) -> bool:
        """Whether ``mininterval`` seconds have passed since the last call that said yes."""
        now = time.monotonic()
        if now - self._last_draw < self.mininterval:
            return False
        self._last_draw = now
        return True


def _bar_of(stage: str) -> Any:
    """A property of the bar of a stage, which is there once the stage has started; TypeError before."""
    name = f"_{stage}_progress_bar"

    def made(bars: TQDMProgressBar) -> _tqdm:
        if (bar := getattr(bars, name)) is None:
            raise TypeError(f"`{type(bars).__name__}.{stage}_progress_bar` is not there before its stage has started.")
        return bar

    return property(made, lambda bars, bar: setattr(bars, name, bar), doc=f"The bar of the stage {stage!r}; TypeError before it.")


class TQDMProgressBar(DrawnBar):
    """The default progress bar: one bar per stage on stdout, or in the notebook where ``ipywidgets`` is installed.

    Shows steps done, elapsed and remaining time, steps per second and the metrics of ``get_metrics``. While a step is compiled
    the bar says so, and the time for it is left out of rate and remaining time.

    The bar is drawn when the batch number is a multiple of ``refresh_rate``, and no more often than tqdm's ``mininterval`` (0.1
    s; environment variable ``TQDM_MININTERVAL``, or override ``init_train_tqdm``), because drawing waits for the device to give
    the metrics' values. The last batch of an epoch is always drawn.

    Args:
        refresh_rate: draw every that many batches; 0 hides the bars. ``TQDM_MINITERS`` in the environment raises it; on Colab
            1 means 20.
        process_position: how many lines to leave above, for bars of your own.
        leave: keep the bar of each finished epoch.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.TQDMProgressBar.html
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(self._resolve_refresh_rate(refresh_rate))
        self._process_position = process_position
        self._train_progress_bar: _tqdm | None = None
        self._val_progress_bar: _tqdm | None = None
        self._test_progress_bar: _tqdm | None = None
        self._predict_progress_bar: _tqdm | None = None
        self._leave = leave
        self._shows_compiling = False

    def __getstate__(self) -> dict[str, Any]:
        # An open bar holds a file and a lock.
        return {key: None if isinstance(value, _tqdm) else value for key, value in vars(self).items()}

    # -- bars ----------------------------------------------------------------------------------------------------------

    train_progress_bar: _tqdm = _bar_of("train")
    val_progress_bar: _tqdm = _bar_of("val")
    test_progress_bar: _tqdm = _bar_of("test")
    predict_progress_bar: _tqdm = _bar_of("predict")

    @property
    def process_position(self) -> int:
        """Lines left above the bars."""
        return self._process_position

    def init_sanity_tqdm(self) -> Tqdm:
        """Makes the bar of the sanity check; override it to change the bar."""
        return self._make_bar(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> Tqdm:
        """Makes the training bar; override it to change the bar."""
        return self._make_bar(self.train_description, leave=True, smoothing=0)

    def init_predict_tqdm(self) -> Tqdm:
        """Makes the prediction bar; override it to change the bar."""
        return self._make_bar(self.predict_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> Tqdm:
        """Makes the validation bar; override it to change the bar."""
        below_train_bar = self.trainer.state.fn != "validate"
        return self._make_bar(self.validation_description, leave=not below_train_bar, line=int(below_train_bar))

    def init_test_tqdm(self) -> Tqdm:
        """Makes the test bar; override it to change the bar."""
        return self._make_bar(self.test_description, leave=True)

    def _make_bar(self, description: str, *, leave: bool, line: int = 0, **options: Any) -> Tqdm:
        return Tqdm(
            desc=description,
            position=2 * self.process_position + line,
            disable=self.is_disabled,
            leave=leave,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
            **options,
        )

    # -- training ------------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, *_: Any) -> None:
        self.val_progress_bar = self.init_sanity_tqdm()
        self.train_progress_bar = Tqdm(disable=True)  # there is none yet, but user code may ask for it

    def on_sanity_check_end(self, *_: Any) -> None:
        self.val_progress_bar.close()
        self.train_progress_bar.close()

    def on_train_start(self, *_: Any) -> None:
        self.train_progress_bar = self.init_train_tqdm()

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._leave:
            self.train_progress_bar = self.init_train_tqdm()
        self._begin_epoch(trainer)

    def _begin_epoch(self, trainer: Trainer) -> None:
        _restart(self.train_progress_bar, self.total_train_batches)
        self.train_progress_bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        bar, n = self._train_progress_bar, batch_idx + 1
        if bar is None:
            return
        if self._shows_compiling:
            metrics = self.get_metrics(trainer, pl_module)  # waits for the step: only then the rate starts
            self._end_compiling(bar, n)
            bar.set_postfix(metrics)
        elif self._should_update(n, bar.total) and _advance(bar, n):
            bar.refresh()
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    def announce(self, text: str) -> None:
        with _tqdm.external_write_mode():  # bars are cleared, and drawn again below the line
            super().announce(text)

    def show_compiling(self, compiling: bool) -> None:
        bar = self._bar_of_stage()
        if compiling and self.is_enabled and not self._shows_compiling and bar is not None:
            self._shows_compiling = True
            bar.set_postfix_str(COMPILING)

    def _bar_of_stage(self) -> _tqdm | None:
        stage = self.trainer.state.stage
        return {
            "train": self._train_progress_bar,
            "sanity_check": self._val_progress_bar,
            "validate": self._val_progress_bar,
            "test": self._test_progress_bar,
            "predict": self._predict_progress_bar,
        }.get("" if stage is None else stage.value)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.train_progress_bar.disable:
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))
        if self._leave:
            self.train_progress_bar.close()

    def on_train_end(self, *_: Any) -> None:
        self.train_progress_bar.close()

    # -- validation, test, prediction ----------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.val_progress_bar = self.init_validation_tqdm()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        if self._train_progress_bar is not None and self.is_enabled and trainer.state.fn == "fit":
            self._train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.test_progress_bar = self.init_test_tqdm()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.test_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.predict_progress_bar = self.init_predict_tqdm()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.predict_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def _start_loader(self, trainer: Trainer, stage: str, dataloader_idx: int) -> None:
        bar: _tqdm = getattr(self, f"{stage}_progress_bar")
        _restart(bar, getattr(self, f"total_{stage}_batches_current_dataloader"))
        description = {"val": self.validation_description, "test": self.test_description}.get(stage, self.predict_description)
        text = self.sanity_check_description if trainer.sanity_checking else description
        bar.set_description(f"{text} DataLoader {dataloader_idx}")

    def _advance_to(self, trainer: Trainer, stage: str, done: int) -> None:
        bars = {"val": self._val_progress_bar, "test": self._test_progress_bar, "predict": self._predict_progress_bar}
        self._advance_eval(bars[stage], done)

    # -- drawing -------------------------------------------------------------------------------------------------------

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Prints above the active bar; nothing where bars are hidden. ``kwargs`` are those of ``tqdm.write``."""
        bars = (self._train_progress_bar, self._val_progress_bar, self._test_progress_bar, self._predict_progress_bar)
        active = next((bar for bar in bars if bar is not None and not bar.disable), None)
        if active is not None:
            active.write(sep.join(map(str, args)), **kwargs)

    def _advance_eval(self, bar: _tqdm | None, n: int) -> None:
        if bar is None:
            return
        if self._shows_compiling:
            self._end_compiling(bar, n)
            bar.set_postfix_str("")
        elif self._should_update(n, bar.total) and _advance(bar, n):
            bar.refresh()

    def _end_compiling(self, bar: _tqdm, n: int) -> None:
        self._shows_compiling = False
        if self._should_update(n, bar.total):
            bar.n = n
        if isinstance(bar, Tqdm):
            bar.restart_rate(n)

    def _should_update(self, current: int, total: float | None) -> bool:
        return self.is_enabled and (current % self.refresh_rate == 0 or current == total)

    @staticmethod
    def _resolve_refresh_rate(refresh_rate: int) -> int:
        if os.getenv("COLAB_GPU") and refresh_rate == 1:
            rank_zero_debug("TQDMProgressBar: refresh_rate=20 instead of 1, because Colab does not keep up with every batch.")
            return 20
        if "TQDM_MINITERS" in os.environ:
            return max(int(os.environ["TQDM_MINITERS"]), refresh_rate)
        return refresh_rate


def convert_inf(x: float | None) -> float | None:
    """``x``, or None for inf and nan, which tqdm takes for an unknown total."""
    return None if x is None or math.isinf(x) or math.isnan(x) else x


def _restart(bar: _tqdm, total: float | None) -> None:
    if isinstance(bar, Tqdm):
        bar.restart(convert_inf(total))
    else:  # a bar that the user made
        bar.reset()
        bar.total = convert_inf(total)
        bar.initial = 0


def _advance(bar: _tqdm, n: int) -> bool:
    """Moves the bar without drawing it; whether it is to be drawn now."""
    if bar.disable:
        return False
    bar.n = n
    return not isinstance(bar, Tqdm) or n == bar.total or bar.due()
