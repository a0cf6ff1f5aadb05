"""``OnExceptionCheckpoint``: saves the state of a run that an exception ends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.checkpoint import Checkpoint

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class OnExceptionCheckpoint(Checkpoint):
    """Saves ``<dirpath>/<filename>.ckpt``, overwriting it, when an exception ends a run; a run that succeeds removes it.

    ::

        trainer = pl.Trainer(callbacks=[OnExceptionCheckpoint("crashes")])

    Args:
        dirpath: directory; it must be given, because an exception may come before anything else is known.
        filename: name without extension.

    Raises:
        ValueError: ``filename`` is empty.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.OnExceptionCheckpoint.html
    """

    FILE_EXTENSION = ".ckpt"

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        super().__init__()
        if not filename:
            raise ValueError("The filename cannot be empty: OnExceptionCheckpoint needs one, without extension.")
        self.dirpath = dirpath
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        """The path of the saved checkpoint."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def on_exception(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        trainer.save_checkpoint(self.ckpt_path)

    def teardown(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        trainer.strategy.remove_checkpoint(self.ckpt_path)
