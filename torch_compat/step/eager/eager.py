"""The eager executor: runs a module's steps op by op in plain torch on this process's CPU, or GPU.

It is what stock Lightning does on one device with the global batch, with the same hooks and logs: the fallback for steps that
cannot be compiled. On several processes each does the same, with the rows of all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torch_compat.run import hook_calls as call
from torch_compat.run.batches import LoggedSize, first_batch_size, flatten_batch, map_tensors
from torch_compat.run.report import ExecutorLog
from torch_compat.step.eager.whole_batch import WholeBatches
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.run_context import RunContext
from torch_compat.step.update.user_step import UserStep

if TYPE_CHECKING:
    from torch_compat.plugins.precision import Precision
    from torch_compat.step.eager.device import EagerDevice
    from torch_compat.step.host.host_values import HostValues

_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True)
class HostBatch:
    """A whole batch on the device of eager steps, with its number of rows, and its weight in an epoch's mean."""

    batch: Any
    size: int
    logged: LoggedSize


class EagerSteps:
    """Runs steps in torch; ``self.log`` reaches the results directly.

    Args:
        precision: the plugin whose forward context surrounds the steps.
        reason: why steps are not compiled.
        whole: puts whole batches together, on several processes.
        device: the device on which steps run; None: the host's CPU, or where a subclass puts batches.
    """

    executor = "eager"

    def __init__(
        self, precision: Precision, reason: str, whole: WholeBatches | None = None, device: EagerDevice | None = None
    ) -> None:
        self.log = ExecutorLog(fallback=reason)
        self.copy_batches = False
        self.kept_rows: set[str] = set()
        self._precision = precision
        self._whole = whole
        self._is_whole = False
        self._device = device

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of the user's steps."""
        return self._precision.forward_context()

    def loaded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``, loaded apart from the random numbers of steps."""
        return batches if self._whole is None else self._whole.loaded(batches)

    def transferred(self, transfer: Callable[[Any, int], Any], batch: Any, dataloader_idx: int) -> Any:
        """All rows of a batch, after the transfer hooks, on the device of the steps."""
        if self._whole is not None:
            self._is_whole = True
            batch = self._whole.gather(batch)
        return self._put(transfer(batch, dataloader_idx))

    def _put(self, batch: Any) -> Any:
        return batch if self._device is None or self._device.is_host else map_tensors(self._device.put, batch)

    def place(self, batch: Any) -> HostBatch:
        """The batch on the device, made whole unless it has been."""
        if self._whole is not None and not self._is_whole:
            batch = self._whole.gather(batch)
        self._is_whole = False
        leaves, spec = flatten_batch(batch)
        logged = LoggedSize.of([leaf.shape for leaf in leaves], spec)
        return HostBatch(self._put(batch), first_batch_size(leaves) or 1, logged)

    def evaluate(
        self, name: str, batch: HostBatch, static: Hashable, host_values: HostValues, call: Callable[[Any, Any], Any]
    ) -> StepOutcome:
        """Run one validation, test or predict step. The result of a predict step is that of this process's rows, on the host."""
        with torch.no_grad(), self._precision.forward_context():
            result = call(batch.batch, None)
        own_rows = name == "predict_step"  # what each process returns and writes; nothing goes on with it
        if own_rows and self._whole is not None:
            result = self._whole.own_rows(result)
        if own_rows and self._device is not None and not self._device.is_host:
            result = map_tensors(torch.Tensor.cpu, result)
        return StepOutcome((), _NOTHING, lambda: result, batch.logged, batch=None if own_rows else batch.batch)

    def look(self) -> None:
        """Torch raises where it is."""

    def wait(self) -> None:
        """A step has ended when it returns, or raises when its values are read."""


class EagerOptimization:
    """Automatic and manual optimization in plain torch.

    Args:
        run: the run.
        steps: the executor.
        optimizers: the optimizers that ``configure_optimizers`` returned.
    """

    def __init__(self, run: RunContext, steps: EagerSteps, optimizers: list[torch.optim.Optimizer]) -> None:
        self._run = run
        self._steps = steps
        self._user = UserStep(run, optimizers, steps.forward_context)
        self._user.scaling = run.executor.loss_scaling

    def run(self, batch: Any, batch_idx: int, stepped: bool) -> StepOutcome:
        """Run a batch: gradients, and the update if ``stepped``."""
        placed = self._begin(batch)
        if self._user.steps_once:
            outputs = self._user.automatic(placed.batch, batch_idx, stepped)
        else:
            outputs = self._user.manual(placed.batch, batch_idx)
        return _outcome(placed, outputs)

    def differentiate(self, batch: Any, batch_idx: int) -> tuple[StepOutcome, torch.Tensor | None]:
        """The forward and backward pass of a batch whose step the compiled executor began; gives the loss, too."""
        placed = self._begin(batch)
        outputs: dict[str, Any] = {}
        loss = self._user.differentiate(placed.batch, batch_idx, outputs)
        return _outcome(placed, outputs), loss

    def update(self, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """The rest of such a step, which is in ``optimizer.step(closure)``."""
        return self._user.update(self._run.optimizers[0], closure, **kwargs)

    def _begin(self, batch: Any) -> HostBatch:
        placed = self._steps.place(batch)
        self._run.fit_loop.results.batch_size = placed.logged
        self._steps.log.steps += 1
        return placed

    def step_again(self, forward: Callable[[], Any], batch_idx: int) -> None:
        """Step the optimizer once more, after ``forward``, with the gradients that are there."""
        run = self._run
        optimizer = run.strategy._lightning_optimizers[0]
        call.module_hook(run, "optimizer_step", run.current_epoch, batch_idx, optimizer, forward)
        self._user.count_step()


def _outcome(batch: HostBatch, outputs: Any) -> StepOutcome:
    return StepOutcome((), _NOTHING, lambda: outputs, batch.logged, batch=batch.batch)
