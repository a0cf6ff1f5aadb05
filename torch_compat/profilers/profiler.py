"""``Profiler``: the base class."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_compat.utilities.cloud_io import get_filesystem
from torch_compat.utilities.rank_zero import rank_zero_info


class Profiler(ABC):
    """Records actions: parts of a run, by name. A subclass gives ``start`` and ``stop``.

    ``Trainer(profiler=...)`` records hooks as ``[Callback]<state key>.<hook>``, ``[LightningModule]<class>.<hook>`` and
    ``[LightningDataModule]<class>.<hook>``, steps as ``[Strategy]<class>.training_step`` (a compiled step's backward pass and
    update are inside of it), and ``run_training_epoch``, ``run_training_batch``, ``[_TrainingEpochLoop].train_dataloader_next``,
    ``[_EvaluationLoop].val_next``. A step is recorded on the host: devices work on while the host goes on.

    In user code: ``with self.trainer.profiler.profile("name"):``, outside of steps (a compiled step's Python runs once).

    Args:
        dirpath: directory of the report; default: the directory of the first logger.
        filename: beginning of the report's name; without it the report goes to the log.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.profilers.Profiler.html
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self._local_rank: int | None = None
        self._stage: str | None = None

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Begins an action."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """Ends an action."""

    def summary(self) -> str:
        """The report; an empty one is not written."""
        return ""

    @contextmanager
    def profile(self, action_name: str) -> Generator[str, None, None]:
        """Profile an action in the block; it ends when the block raises, too."""
        try:
            self.start(action_name)
            yield action_name
        finally:
            self.stop(action_name)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Called when a run starts.

        Args:
            stage: "fit", "validate", "test" or "predict".
            local_rank: index of the process; part of the report's name.
            log_dir: directory of the first logger.
        """
        self._stage = stage
        self._local_rank = local_rank
        self.dirpath = self.dirpath or log_dir

    def teardown(self, stage: str | None) -> None:  # noqa: B027 - optional
        """Called when a run ends."""

    def describe(self) -> None:
        """Writes the report, at the end of a run."""
        summary = self.summary()
        if summary:
            self._write(summary)
        self.teardown(stage=self._stage)

    def _write(self, summary: str) -> None:
        if not (self.filename and self.dirpath):
            self._rank_zero_info(summary)
            return
        path = os.path.join(self.dirpath, self._prepare_filename())
        filesystem = get_filesystem(path)
        filesystem.makedirs(os.fspath(self.dirpath), exist_ok=True)
        with filesystem.open(path, "a") as file:
            file.write(summary)  # pyright: ignore[reportArgumentType]

    def _prepare_filename(self, action_name: str | None = None, extension: str = ".txt") -> str:
        parts = [self._stage, self.filename, self._local_rank, action_name]
        return "-".join(str(part) for part in parts if part not in (None, "")) + extension

    def _rank_zero_info(self, *args: Any, **kwargs: Any) -> None:
        if self._local_rank in (None, 0):
            rank_zero_info(*args, **kwargs)

    @property
    def local_rank(self) -> int:
        """Index of the process; 0 before a run."""
        return self._local_rank or 0
