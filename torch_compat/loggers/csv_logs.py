"""``CSVLogger``: metrics in ``metrics.csv`` and hyperparameters in ``hparams.yaml``."""

from __future__ import annotations

import csv
import os
from typing import TYPE_CHECKING, Any, TextIO, cast

from torch import Tensor

from torch_compat.core.saving import save_hparams_to_yaml
from torch_compat.loggers.logger import rank_zero_experiment
from torch_compat.loggers.versioned import VersionedLogger
from torch_compat.utilities.cloud_io import get_filesystem
from torch_compat.utilities.hyperparameters import add_prefix, as_dict
from torch_compat.utilities.rank_zero import rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping


class ExperimentWriter:
    """Writes one version's ``metrics.csv`` and ``hparams.yaml``.

    Rows are buffered until ``save``. A metric that was not seen before rewrites the file with one more column, so that the header
    always names every column; columns are in alphabetical order.
    """

    NAME_HPARAMS_FILE = "hparams.yaml"
    NAME_METRICS_FILE = "metrics.csv"

    def __init__(self, log_dir: str) -> None:
        self.hparams: dict[str, Any] = {}
        self.metrics: list[dict[str, Any]] = []
        self.metrics_keys: list[str] = []
        self.log_dir = log_dir
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        self._fs = get_filesystem(log_dir)
        self._clear_previous_metrics()
        self._fs.makedirs(log_dir, exist_ok=True)

    def log_hparams(self, params: dict[str, Any]) -> None:
        """Adds hyperparameters and writes all of them."""
        self.hparams.update(params)
        save_hparams_to_yaml(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE), self.hparams)

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Adds one row; ``step`` is the number of buffered rows if not given."""
        row = {key: value.item() if isinstance(value, Tensor) else value for key, value in metrics_dict.items()}
        row["step"] = len(self.metrics) if step is None else step
        self.metrics.append(row)

    def save(self) -> None:
        """Appends the buffered rows to the file."""
        if not self.metrics:
            return
        new_keys = set().union(*self.metrics).difference(self.metrics_keys)
        self.metrics_keys = sorted([*self.metrics_keys, *new_keys])
        exists = self._fs.isfile(self.metrics_file_path)
        if new_keys and exists:
            self._write(self._read(), mode="w", header=True)
        self._write(self.metrics, mode="a" if exists else "w", header=not exists)
        self.metrics = []

    def _read(self) -> list[dict[str, Any]]:
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            return list(csv.DictReader(cast("TextIO", file)))

    def _write(self, rows: list[dict[str, Any]], mode: str, header: bool) -> None:
        with self._fs.open(self.metrics_file_path, mode=mode, newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
            if header:
                writer.writeheader()
            writer.writerows(rows)

    def _clear_previous_metrics(self) -> None:
        if not (self._fs.exists(self.log_dir) and self._fs.listdir(self.log_dir)):
            return
        rank_zero_warn(
            f"CSVLogger's directory {self.log_dir} is not empty: a metrics file in it is deleted and written anew. To keep it,"
            " pass another `version`, or none for the next free one."
        )
        if self._fs.isfile(self.metrics_file_path):
            self._fs.rm_file(self.metrics_file_path)


class CSVLogger(VersionedLogger):
    """Logs to ``<save_dir>/<name>/version_<n>/metrics.csv`` and ``hparams.yaml``, also on remote filesystems through fsspec.

    ::

        trainer = pl.Trainer(logger=CSVLogger("logs", name="first"), log_every_n_steps=10)

    Args:
        save_dir: directory that holds all experiments.
        name: experiment name; None or "" puts the versions directly into ``save_dir``.
        version: a number for ``version_<n>``, a string for a directory of that name, None for the next free number.
        prefix: put before every metric's key, followed by "-".
        flush_logs_every_n_steps: rows are written when ``step + 1`` is a multiple of this, and at the end of the run.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.loggers.csv_logs.html
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._flush_logs_every_n_steps = flush_logs_every_n_steps
        self._experiment: ExperimentWriter | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer; made, with its directory, when first asked on process 0."""
        if self._experiment is None:
            self._fs.makedirs(self.root_dir, exist_ok=True)
            self._experiment = ExperimentWriter(log_dir=self.log_dir)
        return self._experiment

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.experiment.log_hparams(as_dict(params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Tensor | float], step: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if step is None:
            step = len(self.experiment.metrics)
        self.experiment.log_metrics(add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR), step)
        if (step + 1) % self._flush_logs_every_n_steps == 0:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        self.experiment.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        # An experiment that nothing was logged to leaves no empty directory behind.
        if self._experiment is not None:
            self.save()
