"""Accounting of a run's time: in the run report, and in the ledger that ``XLATRAIN_LEDGER`` names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from torch_compat.run.states import TrainerFn
from torch_compat.utilities.rank_zero import rank_zero_info
from xlatrain.cluster import watch
from xlatrain.cluster.watch import progress
from xlatrain.cluster.watch.account import Account
from xlatrain.cluster.watch.goodput import goodput
from xlatrain.cluster.watch.ledger import VARIABLE, Ledger

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

_Item = TypeVar("_Item")
_END: Any = object()
_fits = 0


class RunTime:
    """The account of one run, and its lines in the ledger.

    Attributes:
        account: where the loops book their time.
        announced: whether the run has said how its steps run.
        compiled_before: seconds that programs of the sanity check took, captured and compiled.
        memory_snapshots: of a run whose state is kept in its hosts' memory: how often, how much, and how long it has waited.
        replica_checks: of a ``SilentDataCorruptionCheck``: how many there were, what they took and could not check.
    """

    def __init__(self) -> None:
        self.account = Account(told=self._progress)
        self.announced = False
        self.compiled_before = 0.0
        self.replica_checks: dict[str, Any] = {}
        self.memory_snapshots: dict[str, Any] = {}
        self._began = time.time()
        self._ledger: Ledger | None = None
        self._fit = 0

    def begin_training(self, trainer: Trainer) -> None:
        """The step to start from is known."""
        global _fits
        _fits += 1
        progress.step = trainer.fit_loop.progress.global_step
        path = os.environ.get(VARIABLE)
        if path and jax.process_index() == 0 and not trainer.fast_dev_run:
            self._fit, self._ledger = _fits, Ledger(path)
            self._ledger.write("begin", fit=_fits, time=round(self._began, 3), processes=jax.process_count())

    def waits(self, batches: Iterator[_Item], trainer: Trainer) -> Iterator[_Item]:
        """``batches``; the time until each is there is booked."""
        account, loop = self.account, trainer.fit_loop
        while True:
            account.enter("data_wait")
            try:
                batch = next(batches, _END)
            finally:
                progress.step = loop.progress.global_step
                account.exit()
            if batch is _END:
                return
            yield batch

    def facts(self) -> dict[str, Any]:
        """The facts for the run report: seconds of each kind, and the share of them that was training."""
        seconds = self.account.seconds()
        return {
            "seconds": {kind: round(spent, 3) for kind, spent in seconds.items()},
            "goodput": round(seconds["step"] / sum(seconds.values()), 4),
            **({"stragglers": stragglers} if (stragglers := watch.stragglers()) else {}),
            **({"replica_checks": self.replica_checks} if self.replica_checks else {}),
            **({"memory_snapshots": self.memory_snapshots} if self.memory_snapshots else {}),
        }

    def end(self, trainer: Trainer, outcome: str) -> None:
        """The run is over; process 0 says what the whole job has come to."""
        ledger, self._ledger = self._ledger, None
        if ledger is None or trainer.state.fn != TrainerFn.FITTING:
            return
        progress.step = trainer.fit_loop.progress.global_step
        ledger.write("end", fit=self._fit, outcome=outcome, seconds=self._seconds())
        rank_zero_info(f"{ledger.path}: {goodput(ledger.read())}")

    def _progress(self, _: Account) -> None:
        if self._ledger is not None:
            self._ledger.write("progress", fit=self._fit, seconds=self._seconds())

    def _seconds(self) -> dict[str, float]:
        return {kind: round(spent, 3) for kind, spent in self.account.seconds().items()}
