"""Checkpoints as one file that ``torch.load`` reads. API: ``lightning.pytorch.plugins.io.TorchCheckpointIO``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import torch

from torch_compat.plugins.io.checkpoint_io import CheckpointIO


class TorchCheckpointIO(CheckpointIO):
    """A ``.ckpt`` file by ``torch.save``, written by process 0 from its host memory; any URL that fsspec opens.

    The whole state must fit the memory of one host. A local file is written beside its place and renamed, so that a crash
    leaves the old one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        from torch_compat.plugins.io.mesh_io import facts_of
        from xlatrain.checkpoint import write_file

        self._refuse_options(storage_options)
        write_file(path, lambda file: torch.save(checkpoint, file), facts_of(checkpoint))  # pyright: ignore[reportArgumentType]

    def _refuse_options(self, storage_options: Any | None) -> None:
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported for "
                f"`{type(self).__name__}`: write a CheckpointIO of your own that uses them"
            )

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        from torch_compat.core.saving import read_checkpoint

        return read_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        filesystem, target = fsspec.core.url_to_fs(os.fspath(path))
        if filesystem.exists(target):
            filesystem.rm(target, recursive=True)
