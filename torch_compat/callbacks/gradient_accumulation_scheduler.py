"""``GradientAccumulationScheduler``: how many batches make an optimizer step, by epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.overridden import is_overridden
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Changes ``trainer.accumulate_grad_batches`` at the start of epochs: ``{0: 8, 4: 4}`` is 8 for epochs 0 to 3, 4 from epoch 4
    on.

    ::

        trainer = pl.Trainer(callbacks=[GradientAccumulationScheduler({0: 8, 4: 4})])

    Args:
        scheduling: epoch, counted from 0 → number of batches; 1 before the first epoch named.

    Raises:
        TypeError: ``scheduling`` is empty.
        MisconfigurationException: an epoch is not an int of at least 0, or a number of batches not an int of at least 1.
        RuntimeError: the module optimizes manually (at the start of training).
        ValueError: the trainer has an ``accumulate_grad_batches`` of its own (at the start of training).

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.GradientAccumulationScheduler.html
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        super().__init__()
        if not scheduling:
            raise TypeError("Empty dict cannot be interpreted correct: expected {epoch: batches, ...}, as in {0: 8, 4: 4}.")
        if any(not isinstance(epoch, int) or epoch < 0 for epoch in scheduling):
            raise MisconfigurationException(f"Epoch should be an int greater than or equal to 0. Got {list(scheduling)}.")
        if any(not isinstance(batches, int) or batches < 1 for batches in scheduling.values()):
            raise MisconfigurationException(
                f"Accumulation factor should be an int greater than 0. Got {list(scheduling.values())}."
            )
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether any epoch accumulates."""
        return any(batches > 1 for batches in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Batches per optimizer step in ``epoch``."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                "Automatic gradient accumulation and the `GradientAccumulationScheduler` is not supported for manual "
                "optimization, where the module itself steps: remove the callback, or set `automatic_optimization = True`."
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                "You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler` callback: both say the"
                f" number of batches, {trainer.accumulate_grad_batches} and {self.scheduling}; remove one of them."
            )
        if self.going_to_accumulate_grad_batches():
            _warn_of_overridden_steps(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)


def _warn_of_overridden_steps(pl_module: LightningModule) -> None:
    names = [name for name in ("optimizer_step", "optimizer_zero_grad") if is_overridden(name, pl_module)]
    if names:
        rank_zero_warn(
            "When using `Trainer(accumulate_grad_batches != 1)` and overriding `LightningModule.optimizer_{step,zero_grad}`, the "
            f"hooks are called once for each optimizer step, not for every batch: here {' and '.join(names)} of "
            f"{type(pl_module).__name__}."
        )
