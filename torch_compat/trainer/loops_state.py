"""``checkpoint["loops"]``: the counters of every loop as stock's loops save them, in stock's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.trainer.progress import _BatchProgress, _ProcessedTracker, _Progress

if TYPE_CHECKING:
    from torch_compat.trainer.fit_loop import FitLoop


def loops_state(fit_loop: FitLoop) -> dict[str, Any]:
    """``checkpoint["loops"]``. Of evaluation outside of training nothing is in a checkpoint: it begins anew."""
    return {
        "fit_loop": fit_state(fit_loop),
        **{name: {"state_dict": {}, "batch_progress": _no_batches().state_dict()} for name in ("validate_loop", "test_loop")},
        "predict_loop": {"state_dict": {}, "batch_progress": _Progress.from_defaults(_ProcessedTracker).state_dict()},
    }


def fit_state(fit_loop: FitLoop) -> dict[str, Any]:
    """``checkpoint["loops"]["fit_loop"]``."""
    inner = fit_loop.epoch_loop
    return {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": inner._batches_that_stepped},
        "epoch_loop.batch_progress": inner.batch_progress.state_dict(),
        "epoch_loop.scheduler_progress": inner.scheduler_progress.state_dict(),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": inner.automatic_optimization.optim_progress.state_dict(),
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": inner.manual_optimization.optim_step_progress.state_dict(),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": inner.val_loop.batch_progress.state_dict(),
        "epoch_progress": fit_loop.epoch_progress.state_dict(),
    }


def _no_batches() -> _BatchProgress:
    return _BatchProgress.from_defaults(_ProcessedTracker)  # pyright: ignore[reportReturnType]
