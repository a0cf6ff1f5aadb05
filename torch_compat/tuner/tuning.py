"""``Tuner``: finds a learning rate or a batch size before training. API: ``lightning.pytorch.tuner.Tuner`` 2.6."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch_compat.callbacks.batch_size_finder import BatchSizeFinder
from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.lr_finder import LearningRateFinder
from torch_compat.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from torch_compat.core.datamodule import LightningDataModule
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.tuner.lr_finder import _LRFinder

Method = Literal["fit", "validate", "test", "predict"]


class Tuner:
    """Runs a few steps of a Trainer's function with changing learning rate or batch size.

    Afterwards weights, optimizers and counters are as they were, after ``lr_find`` random generators too (a search of batch sizes
    moves them, as in stock); nothing is written to disk.

    ::

        found = Tuner(trainer).lr_find(module, loader, num_training=20)
        found.suggestion()

    Args:
        trainer: runs the steps.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def scale_batch_size(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        method: Method = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size (of one device) that fits into memory, and set it.

        Args:
            model: whose hook, or its datamodule's, makes the loaders with the batch size.
            train_dataloaders, val_dataloaders, dataloaders: for Lightning's signature: loaders that are made already have a size.
            datamodule: makes the loaders.
            method: the Trainer's function to run.
            mode: "power" doubles until memory runs out, "binsearch" then halves the interval.
            steps_per_trial: steps with each size.
            init_val: first size.
            max_trials: most sizes to try.
            batch_arg_name: attribute of the model, its hparams or its datamodule that holds the size.
            margin: with "binsearch", the result is made smaller by this part.
            max_val: largest size to try.

        Returns:
            The size; None if ``fast_dev_run`` is on.

        Raises:
            MisconfigurationException: loaders passed here, no such attribute, or several processes.
            ValueError: the Trainer has a BatchSizeFinder already.
        """
        _check_loaders(train_dataloaders, val_dataloaders, dataloaders, method)
        self._refuse_second(BatchSizeFinder)
        finder = BatchSizeFinder(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        finder._early_exit = True
        self._run(finder, model, train_dataloaders, val_dataloaders, dataloaders, datamodule, method)
        return finder.optimal_batch_size

    def lr_find(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        method: Method = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> _LRFinder | None:
        """Run a learning rate range test, and set the suggested learning rate.

        Args:
            model: the module.
            train_dataloaders, val_dataloaders, datamodule: as ``Trainer.fit`` takes them.
            dataloaders: none: only ``fit`` has a learning rate.
            method: "fit".
            min_lr, max_lr: range of learning rates.
            num_training: how many are tried, one in each step.
            mode: "exponential" or "linear": how they grow.
            early_stop_threshold: the test ends when the averaged loss is so many times the best one; None for never.
            update_attr: set the model's attribute to the suggestion.
            attr_name: its name; default: ``lr`` or ``learning_rate``.

        Returns:
            The result, with ``suggestion()``, ``results`` and ``plot()``; None if ``fast_dev_run`` is on.

        Raises:
            MisconfigurationException: another method than "fit", or several optimizers.
            AttributeError: no attribute holds the learning rate.
            ValueError: the Trainer has a LearningRateFinder already.
        """
        if method != "fit":
            raise MisconfigurationException(f"method='fit' is the only valid configuration to run lr finder, got {method!r}.")
        _check_loaders(train_dataloaders, val_dataloaders, dataloaders, method)
        self._refuse_second(LearningRateFinder)
        finder = LearningRateFinder(min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name)
        finder._early_exit = True
        self._run(finder, model, train_dataloaders, val_dataloaders, dataloaders, datamodule, method)
        return finder.optimal_lr

    def _refuse_second(self, kind: type[Callback]) -> None:
        if any(isinstance(callback, kind) for callback in self._trainer.callbacks):
            raise ValueError(
                f"Trainer is already configured with a `{kind.__name__}` callback, which does the same: keep one of the two."
            )

    def _run(self, finder: Callback, model: Any, train: Any, val: Any, loaders: Any, datamodule: Any, method: Method) -> None:
        trainer = self._trainer
        trainer.callbacks = [finder, *trainer.callbacks]
        try:
            if method == "fit":
                trainer.fit(model, train, val, datamodule)
            elif method == "predict":
                trainer.predict(model, loaders, datamodule=datamodule)
            else:
                getattr(trainer, method)(model, loaders, datamodule=datamodule)
        finally:
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not finder]


def _check_loaders(train: Any, val: Any, loaders: Any, method: str) -> None:
    if method not in ("fit", "validate", "test", "predict"):
        raise ValueError(f"method {method!r} is invalid. Should be one of ('fit', 'validate', 'test', 'predict').")
    if method == "fit" and loaders is not None:
        raise MisconfigurationException(
            f"In tuner with method={method!r}, `dataloaders` argument should be None: pass `train_dataloaders` and"
            " `val_dataloaders`."
        )
    if method != "fit" and (train is not None or val is not None):
        raise MisconfigurationException(
            f"In tuner with `method`={method!r}, `train_dataloaders` and `val_dataloaders` arguments should be None: pass"
            " `dataloaders`."
        )
