"""``BatchSizeFinder``: looks for the largest batch size that fits into memory, before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.exceptions import MisconfigurationException, _TunerExitException
from torch_compat.utilities.parsing import lightning_hasattr
from torch_compat.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer


class BatchSizeFinder(Callback):
    """Finds a batch size when ``fit``, ``validate``, ``test`` or ``predict`` starts, and runs with it.

    The size is that of one device: what the module's (or datamodule's) hooks give to their DataLoaders, as the attribute
    ``batch_arg_name``. Each size that is tried compiles a program. Several devices of one process are supported, several
    processes are not.

    ::

        class Sized(BoringModel):
            batch_size = 2

            def train_dataloader(self):
                return DataLoader(torch.randn(64, 32), self.batch_size)

        finder = BatchSizeFinder(max_trials=2)
        pl.Trainer(max_epochs=1, callbacks=[finder]).fit(Sized())
        assert finder.optimal_batch_size == 4

    Args:
        mode: "power" doubles until memory runs out, "binsearch" then halves the interval.
        steps_per_trial: steps with each size.
        init_val: first size.
        max_trials: most sizes to try.
        batch_arg_name: attribute of the module, its hparams or the datamodule.
        margin: with "binsearch", the result is made smaller by this part.
        max_val: largest size to try.

    Attributes:
        optimal_batch_size: the result.

    Raises:
        ValueError: another mode.
        MisconfigurationException: (when a run starts) no such attribute, several loaders, loaders that were passed to the
            Trainer, or several processes.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.BatchSizeFinder.html
    """

    SUPPORTED_MODES = ("power", "binsearch")

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        mode = mode.lower()
        if mode not in self.SUPPORTED_MODES:
            raise ValueError(f"`mode` should be either of {self.SUPPORTED_MODES}, found {mode!r}")
        self.optimal_batch_size: int | None = init_val
        self._mode = mode
        self._steps_per_trial = steps_per_trial
        self._init_val = init_val
        self._max_trials = max_trials
        self._batch_arg_name = batch_arg_name
        self._margin = margin
        self._max_val = max_val
        self._early_exit = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str | None = None) -> None:
        from torch_compat.tuner.batch_size_scaling import check_loaders

        if trainer.num_nodes > 1:
            raise MisconfigurationException(
                "The Batch size finder is not supported on several processes: find the size on one host, or"
                " with `xlatrain preflight` for the pod."
            )
        check_loaders(trainer)
        if not lightning_hasattr(pl_module, self._batch_arg_name):
            raise MisconfigurationException(
                f"Field {self._batch_arg_name} not found in `model`, `datamodule`, nor their `hparams` attributes: set"
                f" `self.{self._batch_arg_name}` in the model, or pass the name of its own as `batch_arg_name`."
            )
        if hasattr(pl_module, self._batch_arg_name) and self._batch_arg_name in getattr(pl_module, "hparams", {}):
            rank_zero_warn(
                f"Field `model.{self._batch_arg_name}` and `model.hparams.{self._batch_arg_name}` are mutually exclusive!"
                " The search sets both, and loaders may read either: keep one of them."
            )

    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Runs the search; weights, optimizer and counters are as before afterwards, but for the batch size."""
        from torch_compat.tuner.batch_size_scaling import scale_batch_size

        self.optimal_batch_size = scale_batch_size(
            trainer,
            self._mode,
            self._steps_per_trial,
            self._init_val,
            self._max_trials,
            self._batch_arg_name,
            self._margin,
            self._max_val,
        )
        if self._early_exit:
            raise _TunerExitException

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self.scale_batch_size(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.scale_batch_size(trainer, pl_module)
