"""Names of stock's Trainer and loops that its users know although they are not public, and those that are never called here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.run.states import RunningStage, TrainerFn
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.overrides import overridden

if TYPE_CHECKING:
    from torch_compat.run.states import TrainerState
    from torch_compat.trainer.evaluation_loop import EvaluationLoop
    from torch_compat.trainer.fit_loop import FitLoop
    from torch_compat.trainer.loop import Loop
    from torch_compat.trainer.prediction_loop import PredictionLoop
    from torch_compat.trainer.results import Results

_OF_TRAINER = (
    *("_fit_impl", "_validate_impl", "_test_impl", "_predict_impl", "_run", "_run_stage", "_run_sanity_check", "_teardown"),
    *("_setup_on_init", "_log_device_info", "_restore_modules_and_callbacks"),
)
_OF_LOOPS = ("reset", "on_run_start", "advance", "on_advance_start", "on_advance_end", "on_run_end", "teardown")


def refuse_private_trainer_methods(trainer: Any) -> None:
    """Whether a subclass of the Trainer overrides methods that are called under stock only.

    Raises:
        MisconfigurationException: names them.
    """
    if found := overridden(trainer, *_OF_TRAINER):
        raise MisconfigurationException(
            f"{type(trainer).__qualname__} overrides {', '.join(found)} of stock's Trainer, which are internal and never called "
            "here: override fit, validate, test or predict, or use hooks of a Callback"
        )


def refuse_private_loop_methods(loop: Any) -> None:
    """Whether a subclass of a loop overrides methods that are called under stock only.

    Raises:
        MisconfigurationException: names them.
    """
    if found := overridden(loop, *_OF_LOOPS):
        raise MisconfigurationException(
            f"{type(loop).__qualname__} overrides {', '.join(found)} of stock's loop, which are internal and never called here: "
            "override `run`, use hooks of a Callback, or write the loop yourself with Fabric"
        )


def cli_lightning_logo() -> None:
    """Print a line in place of stock's picture. API: ``lightning.pytorch.cli_lightning_logo``."""
    print("\n⚡ Lightning, on a mesh\n")


class StockNames:
    """The running parts of the Trainer, under stock's names."""

    state: TrainerState
    fit_loop: FitLoop
    validate_loop: EvaluationLoop
    test_loop: EvaluationLoop
    predict_loop: PredictionLoop

    @property
    def val_check_batch(self) -> int | float | None:
        """The number of training batches after which validation is due; None before the loaders are known, and by time."""
        return self.fit_loop.validation.check_batch

    @property
    def _evaluation_loop(self) -> EvaluationLoop:
        """The loop that validates or tests in this run."""
        if self.state.fn in (TrainerFn.FITTING, TrainerFn.VALIDATING):
            return self.validate_loop
        if self.state.fn == TrainerFn.TESTING:
            return self.test_loop
        raise RuntimeError("The `Trainer._evaluation_loop` property isn't defined. Accessed outside of scope")

    @property
    def _active_loop(self) -> Loop | None:
        """The loop that runs now."""
        stage = self.state.stage
        if stage is None:
            return None
        if stage == RunningStage.TRAINING:
            return self.fit_loop
        return self.predict_loop if stage == RunningStage.PREDICTING else self._evaluation_loop

    @property
    def _results(self) -> Results | None:
        """The results that values are logged to now."""
        loop = self._active_loop
        return None if loop is None or loop is self.predict_loop else loop._results  # pyright: ignore[reportAttributeAccessIssue]
