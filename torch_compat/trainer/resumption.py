"""The place where a fit goes on: what a checkpoint says of it, and what one that is saved now has to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_compat.trainer.fit_counts import FitCounts, Phase, Progress


@dataclass
class Resumption:
    """The place where a checkpoint lets a fit go on.

    Attributes:
        loaded: the run goes on from a checkpoint, and has not finished an epoch yet.
        batches: of the epoch that is next, which have been taken.
        validation: whether it begins with the validation of the last batch.
        restarts: what was loaded is continued as by stock's loops that call themselves restarting: inside of an epoch, or where
            steps are counted instead of epochs. No sanity check is made then.
        continues_epoch: whether the checkpoint was saved among the batches of the epoch that is next.
        ended_epoch: whether it was saved in the hooks at an epoch's end.
        state: this process's part of it, until that is taken up.
    """

    loaded: bool = False
    batches: int = 0
    validation: bool = False
    restarts: bool = False
    continues_epoch: bool = False
    ended_epoch: bool = False
    state: dict[str, Any] | None = None

    def load(self, state: Mapping[str, Any], counts: FitCounts, *, counts_steps: bool) -> None:
        """Take up what :func:`saved` gave, and give it to the counts.

        Args:
            counts_steps: whether steps are limited, and not epochs alone.
        """
        names = ("epoch", "total_batch", "global_step", "logged_step")
        counts.progress = Progress(**{name: state[name] for name in names})
        counts.scheduler_steps = state.get("scheduler_steps", 0)
        unfinished = state.get("unfinished_epoch", state["batch"] > 0)
        counts.ended_with_last = state["epoch"] > 0 and not unfinished
        counts.shown_batches = state.get("shown_batches", state["batch"])
        self.batches = state["batch"]
        self.validation = state["validation_pending"]
        self.restarts = unfinished or counts_steps
        self.ended_epoch = state.get("ended_epoch", False)
        self.continues_epoch = state.get("inside", state["batch"] > 0)
        self.loaded = True


def saved(counts: FitCounts, *, validation_pending: bool) -> dict[str, Any]:
    """Counters, as of the steps that have run: more than stock's layout has a place for."""
    progress, ran, inside = counts.progress, int(counts.step_ran), counts.is_inside
    return {
        "epoch": counts.epochs_over,
        "unfinished_epoch": counts.phase in (Phase.STARTING, Phase.BATCHES),
        "ended_epoch": counts.phase is Phase.ENDING,
        "inside": inside,
        "shown_batches": (progress.batch if counts.shown_batches is None else counts.shown_batches) + ran,
        "batch": progress.batch + ran if inside else 0,
        "total_batch": progress.total_batch + ran,
        "global_step": progress.global_step,
        "logged_step": progress.logged_step + (ran and not counts.accumulates()),
        "validation_pending": validation_pending,
        "scheduler_steps": counts.scheduler_steps,
        "is_last_batch": bool(ran and inside and counts.all_batches_done),
    }
