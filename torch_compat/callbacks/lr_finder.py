"""``LearningRateFinder``: a learning rate range test at the beginning of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.exceptions import _TunerExitException
from torch_compat.utilities.seed import isolate_rng

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer


class LearningRateFinder(Callback):
    """Finds a learning rate when ``fit`` starts, and trains with it.

    Override ``on_fit_start`` to do nothing and call ``lr_find(trainer, pl_module)`` in another hook to look for one at other
    times.

    ::

        finder = LearningRateFinder(num_training_steps=40)
        pl.Trainer(max_epochs=1, devices=1, callbacks=[finder]).fit(module)
        assert module.lr == finder.optimal_lr.suggestion()

    Args:
        min_lr, max_lr: range of learning rates.
        num_training_steps: how many are tried, one in each step.
        mode: "exponential" or "linear": how they grow.
        early_stop_threshold: the test ends when the averaged loss is so many times the best one; None for never.
        update_attr: set the module's attribute, and the optimizer's rate, to the suggestion.
        attr_name: the attribute's name; default: ``lr`` or ``learning_rate``.

    Attributes:
        optimal_lr: the result, with ``suggestion()``, ``results`` and ``plot()``; None before it is there.

    Raises:
        ValueError: another mode.
        AttributeError, MisconfigurationException: (when ``fit`` starts) no attribute holds the rate; several optimizers.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.LearningRateFinder.html
    """

    SUPPORTED_MODES = ("linear", "exponential")

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> None:
        mode = mode.lower()
        if mode not in self.SUPPORTED_MODES:
            raise ValueError(f"`mode` should be either of {self.SUPPORTED_MODES}, found {mode!r}")
        self._min_lr = min_lr
        self._max_lr = max_lr
        self._num_training_steps = num_training_steps
        self._mode = mode
        self._early_stop_threshold = early_stop_threshold
        self._update_attr = update_attr
        self._attr_name = attr_name
        self._early_exit = False
        self.optimal_lr: Any = None

    def lr_find(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Runs the test; all but the learning rate is as before afterwards, random generators too."""
        from torch_compat.tuner.lr_finder import lr_find

        with isolate_rng():
            self.optimal_lr = lr_find(
                trainer,
                pl_module,
                min_lr=self._min_lr,
                max_lr=self._max_lr,
                num_training=self._num_training_steps,
                mode=self._mode,
                early_stop_threshold=self._early_stop_threshold,
                update_attr=self._update_attr,
                attr_name=self._attr_name,
            )
        if self._early_exit:
            raise _TunerExitException

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lr_find(trainer, pl_module)
