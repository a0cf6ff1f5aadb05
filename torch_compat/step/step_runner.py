"""The runner of a run's steps, compiled, eager, on torch's own devices, or without any device, as the dispatcher sees it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

from torch_compat.run.batches import LoggedSize
from torch_compat.run.report import ExecutorLog
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.outcome import StepOutcome


class StepBatch(Protocol):
    """A batch where steps run, with its weight in an epoch's mean."""

    @property
    def logged(self) -> LoggedSize: ...


class StepRunner(Protocol):
    """A way of running steps. Training batches go through an optimization, which is made for it.

    Attributes:
        executor: ``"compiled"`` or ``"eager"``.
        log: what the run report says of the steps.
        copy_batches: whether a batch may be overwritten while its step still runs.
        kept_rows: names of methods whose steps left, in this epoch, values of this process's rows on the host.
    """

    @property
    def executor(self) -> str: ...

    @property
    def log(self) -> ExecutorLog: ...

    copy_batches: bool
    kept_rows: set[str]

    def loaded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """A pass over batches begins, or goes on here: the batches, as steps of this kind want them."""
        ...

    def transferred(self, transfer: Callable[[Any, int], Any], batch: Any, dataloader_idx: int) -> Any:
        """The batch that hooks and the step get, after the hooks of ``transfer``."""
        ...

    def place(self, batch: Any) -> Any:
        """The :class:`StepBatch` of a batch."""
        ...

    def evaluate(
        self, name: str, batch: Any, static: Hashable, host_values: HostValues, call: Callable[[Any, Any], Any]
    ) -> StepOutcome:
        """Run one validation, test or predict step.

        Args:
            name: of the method.
            batch: from :meth:`place`.
            static: what else decides about the step (the index of the dataloader).
            host_values: the loop's counters.
            call: ``(batch, tracer) -> result``, the user's method; where user code runs itself, the tracer is None.
        """
        ...

    def look(self) -> None:
        """Raise what a step until now found inside of its program."""

    def wait(self) -> None:
        """Wait until all steps that were begun have ended: a failure in the last of them is a failure of the run."""
