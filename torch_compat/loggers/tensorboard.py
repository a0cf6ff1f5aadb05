"""``TensorBoardLogger``: event files for TensorBoard."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_compat.core.export import _scripting
from torch_compat.core.saving import save_hparams_to_yaml
from torch_compat.loggers.logger import rank_zero_experiment
from torch_compat.loggers.versioned import VersionedLogger
from torch_compat.utilities.hyperparameters import add_prefix, as_dict, flatten, plain_values
from torch_compat.utilities.rank_zero import rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from torch.utils.tensorboard import SummaryWriter

    from torch_compat.core.module import LightningModule


class TensorBoardLogger(VersionedLogger):
    """Logs to event files in ``<save_dir>/<name>/version_<n>[/<sub_dir>]``, hyperparameters also to ``hparams.yaml``.

    ::

        trainer = pl.Trainer(logger=TensorBoardLogger("logs", name="first"))

    Args:
        save_dir: directory that holds all experiments.
        name: experiment name; None or "" puts the versions directly into ``save_dir``.
        version: a number for ``version_<n>``, a string for a directory of that name, None for the next free number.
        log_graph: record the module's graph at the start of a run, from ``example_input_array``.
        default_hp_metric: show hyperparameters that were logged without metrics with a metric ``hp_metric`` of -1; TensorBoard
            lists no hyperparameters without one.
        prefix: put before every metric's key, followed by "-".
        sub_dir: directory below the version's.
        kwargs: for ``torch.utils.tensorboard.SummaryWriter``: ``max_queue``, ``flush_secs``, ``comment``, ``filename_suffix``,
            ...

    Raises:
        ModuleNotFoundError: ``tensorboard`` is not installed.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.loggers.tensorboard.html
    """

    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "TensorBoardLogger writes with the package `tensorboard`, which is not installed: `pip install tensorboard`,"
                " or use CSVLogger."
            )
        super().__init__(save_dir, name, version, prefix)
        self.hparams: dict[str, Any] = {}
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self._kwargs = kwargs
        self._experiment: SummaryWriter | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_experiment": None}  # an open event file stays in its process

    @property
    def sub_dir(self) -> str | None:
        """Directory below the version's, if any."""
        return self._sub_dir

    @property
    def log_dir(self) -> str:
        """Directory of the event files, with ``~`` and environment variables filled in."""
        path = super().log_dir
        if self.sub_dir is not None:
            path = os.path.join(path, self.sub_dir)
        return os.path.expanduser(os.path.expandvars(path))

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """The ``SummaryWriter``; made, with its directory, when first asked on process 0."""
        if self._experiment is None:
            from torch.utils.tensorboard import SummaryWriter

            if self.root_dir:
                self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = SummaryWriter(log_dir=self.log_dir, **self._kwargs)
        return self._experiment

    @rank_zero_only
    def log_metrics(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, metrics: Mapping[str, Any], step: int | None = None
    ) -> None:
        """Records numbers, tensors of one element, and dicts of them (as one chart).

        Raises:
            ValueError: a value is none of these.
        """
        for name, value in add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR).items():
            try:
                if isinstance(value, dict):
                    self.experiment.add_scalars(name, value, step)
                else:
                    self.experiment.add_scalar(name, value.item() if isinstance(value, Tensor) else value, step)
            except Exception as error:  # the writer raises whatever the value's type leads to
                raise ValueError(
                    f"TensorBoardLogger cannot log {name!r}: expected a number, a tensor of one element or a dict of them, found"
                    f" {type(value).__name__} {value!r}. Other data: `logger.experiment.add_image`, `add_histogram`, ..."
                ) from error

    @rank_zero_only
    def log_hyperparams(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        params: dict[str, Any] | Namespace,
        metrics: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> None:
        """Records hyperparameters and the metrics to show beside them (a number alone counts as ``hp_metric``)."""
        params = as_dict(params)
        self.hparams.update(params)
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        elif not isinstance(metrics, dict):
            metrics = {"hp_metric": metrics}
        if not metrics:
            return
        from torch.utils.tensorboard.summary import hparams

        self.log_metrics(metrics, step)
        writer = self.experiment._get_file_writer()
        assert writer is not None
        for summary in hparams(plain_values(flatten(params)), metrics):
            writer.add_summary(summary, step)

    @rank_zero_only
    def log_graph(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: LightningModule, input_array: Tensor | None = None
    ) -> None:
        if not self._log_graph:
            return
        example = model.example_input_array if input_array is None else input_array
        if example is None:
            self._warn_no_example()
        elif not isinstance(example, (Tensor, tuple)):
            rank_zero_warn(
                f"TensorBoardLogger(log_graph=True) cannot trace with an `example_input_array` of type {type(example).__name__}:"
                " make it a tensor, or a tuple of `forward`'s positional arguments."
            )
        else:
            example = model._apply_batch_transfer_handler(model._on_before_batch_transfer(example))
            with _scripting(model):
                self.experiment.add_graph(model, example)

    @staticmethod
    def _warn_no_example() -> None:
        """Warn that there is nothing to trace the graph with."""
        rank_zero_warn(
            "TensorBoardLogger(log_graph=True) has nothing to trace the graph with: set `self.example_input_array` in the"
            " LightningModule."
        )

    @rank_zero_only
    def save(self) -> None:
        self.experiment.flush()
        path = os.path.join(self.log_dir, self.NAME_HPARAMS_FILE)
        if self._fs.isdir(self.log_dir) and not self._fs.isfile(path):
            save_hparams_to_yaml(path, self.hparams)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._experiment is not None:
            self._experiment.flush()
            self._experiment.close()
        if status == "success":
            self.save()
