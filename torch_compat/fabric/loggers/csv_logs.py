"""Metrics in ``metrics.csv``. API: ``lightning.fabric.loggers.CSVLogger``."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from torch_compat import loggers
from torch_compat.loggers.csv_logs import ExperimentWriter
from torch_compat.loggers.versioned import RootDirectory

_ExperimentWriter = ExperimentWriter


class CSVLogger(RootDirectory, loggers.CSVLogger):
    """Logs metrics to ``<root_dir>/<name>/version_<n>/metrics.csv``.

    Args:
        root_dir: directory that holds all experiments.
        name: experiment name; None or "" puts the versions directly into ``root_dir``.
        version: a number for ``version_<n>``, a string for a directory of that name, None for the next free number.
        prefix: put before every metric's key, followed by "-".
        flush_logs_every_n_steps: rows are written when ``step + 1`` is a multiple of this, and at the end.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)

    def log_hyperparams(self, params: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raises:
        NotImplementedError: as in stock; ``lightning.pytorch.loggers.CSVLogger`` writes them.
        """
        raise NotImplementedError(
            "The `CSVLogger` does not yet support logging hyperparameters: use `lightning.pytorch.loggers.CSVLogger`, which does."
        )
