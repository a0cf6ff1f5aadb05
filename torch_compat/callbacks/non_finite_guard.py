"""Gradients that are not finite: told, or kept away from the weights, at next to no cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.step.finite import FiniteGuard

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

VARIABLE = "XLATRAIN_NON_FINITE"
Action = Literal["warn", "stop", "skip"]
_LAG = 2  # steps after which a flag is read: by then its step is done, and the devices have others to do


class NonFiniteError(RuntimeError):
    """Gradients were NaN or infinite."""


class NonFiniteGuard(Callback):
    """Looks at the gradients of every optimizer step, inside the compiled program, before clipping.

    Where ``Trainer(detect_anomaly=True)`` runs op by op to find the operation, this names the step and the parameters, and
    costs one more reduction over the gradients. The host looks two steps later, when the step is done as a rule. For a script
    that is not to be changed: ``XLATRAIN_NON_FINITE=warn``, ``stop`` or ``skip``.

    ::

        trainer = pl.Trainer(callbacks=[NonFiniteGuard("skip")])

    Args:
        action: ``"warn"``: a warning, and the step is taken as without us. ``"stop"``: the step changes no weights, and training
            ends with an error, so that no checkpoint holds what is not finite. ``"skip"``: the step changes no weights, optimizer
            state or buffers, and training goes on, as with ``optax.apply_if_finite``.
        max_consecutive_errors: for ``"skip"``: that many such steps one after the other end training with an error. (``optax``
            applies them then.)

    Attributes:
        notfinite_count: such steps in a row, up to the last that was looked at.
        total_notfinite: all of them. (The names are optax's.)

    Raises (during training):
        NonFiniteError: names the step and the parameters.
        MisconfigurationException: steps are not compiled, optimization is manual, or ``precision="16-mixed"``, which skips
            such steps itself.
    """

    def __init__(self, action: Action = "stop", max_consecutive_errors: int = 10) -> None:
        if action not in get_args(Action):
            raise MisconfigurationException(f"NonFiniteGuard(action={action!r}) (or {VARIABLE}): expected {get_args(Action)}")
        if max_consecutive_errors < 1:
            raise MisconfigurationException(
                f"NonFiniteGuard(max_consecutive_errors={max_consecutive_errors}): expected at least 1"
            )
        self.action = action
        self.max_consecutive_errors = max_consecutive_errors
        self.notfinite_count = 0
        self.total_notfinite = 0
        self.guard = FiniteGuard(skip=action != "warn")
        self._waiting: deque[tuple[Any, str]] = deque()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.notfinite_count = 0
        self._waiting.clear()
        if not pl_module.automatic_optimization or len(trainer.optimizers) > 1:
            raise MisconfigurationException(
                "NonFiniteGuard looks at the step of automatic optimization; with manual optimization look in training_step, "
                "e.g. log the gradients' norm"
            )
        if trainer.scaler is not None:
            raise MisconfigurationException(
                f"precision={trainer.precision!r} skips steps whose gradients are not finite by itself, as torch's GradScaler: "
                "leave NonFiniteGuard out, or use precision='bf16-mixed'"
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        steps: Any = trainer.executor.steps
        if steps.executor != "compiled":
            raise MisconfigurationException(
                f"NonFiniteGuard looks inside compiled steps, but they run eagerly ({steps.log.short_reason}); use "
                "Trainer(detect_anomaly=True), or mend that"
            )
        steps.index_looks.skipped = "training_step" if self.action == "skip" else None
        flags, steps.finite = steps.finite, None
        if flags is None:  # a batch that only accumulated
            return
        where = f"optimizer step {trainer.global_step} (epoch {trainer.current_epoch}, batch {batch_idx})"
        self._waiting.append((flags, where))
        if len(self._waiting) > _LAG:
            self._look(steps, *self._waiting.popleft())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look_at_all(trainer.executor.steps)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look_at_all(trainer.executor.steps)

    def _look_at_all(self, steps: Any) -> None:
        while self._waiting:
            self._look(steps, *self._waiting.popleft())

    def _look(self, steps: Any, flags: Any, where: str) -> None:
        found = np.asarray(flags)
        if found.all():
            self.notfinite_count = 0
            return
        steps.index_looks.look()  # an index out of range spoils the gradients where the step is not to be taken, and says why
        self.notfinite_count += 1
        self.total_notfinite += 1
        names = self.guard.not_finite(found)
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        text = f"the gradients of {where} are not finite: those of {some}"
        if self.action == "stop":
            raise NonFiniteError(
                f"{text}. The step was not taken: the weights are those of before. Look at the batch and the loss; "
                "Trainer(detect_anomaly=True) names the operation"
            )
        if self.action == "skip" and self.notfinite_count >= self.max_consecutive_errors:
            raise NonFiniteError(f"{text}, as were all {self.notfinite_count} last ones (max_consecutive_errors); none was taken")
        taken = "it was skipped" if self.action == "skip" else "it was taken"
        rank_zero_warn(f"{text}; {taken} ({self.notfinite_count} in a row, {self.total_notfinite} in all)")


def guard_of(callbacks: Iterable[Callback]) -> FiniteGuard | None:
    """The guard that the compiled update runs for a :class:`NonFiniteGuard` among the callbacks; None without."""
    return next((callback.guard for callback in callbacks if isinstance(callback, NonFiniteGuard)), None)
