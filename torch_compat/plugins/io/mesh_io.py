"""The plugin that runs save with by default: a file as stock's, or a directory of shards where parameters are split."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch_compat.plugins.io.torch_io import TorchCheckpointIO
from torch_compat.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    import jax
    import torch

    from xlatrain.checkpoint import PendingSave


class MeshCheckpointIO(TorchCheckpointIO):
    """Checkpoints of one ``.ckpt`` file, as stock's, if arrays are whole on every device; else directories of shards.

    Both are atomic, committed in the background, restored onto any mesh; see :mod:`xlatrain.checkpoint`. Either is read.

    Attributes:
        array_of: for a tensor in the dict, its array on the mesh, or None; set by the strategy that uses this.
        wait: whether :meth:`save_checkpoint` returns when the checkpoint is committed; else when its arrays are off the devices.
        pending: the last save.
    """

    collective: ClassVar[bool] = True
    _directory: ClassVar[bool | None] = None

    def __init__(self) -> None:
        self.array_of: Callable[[torch.Tensor], jax.Array | None] | None = None
        self.wait = True
        self.pending: PendingSave | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        from torch_compat.checkpoint.checkpoint_dict import save_checkpoint_dict

        self._refuse_options(storage_options)
        self.pending = save_checkpoint_dict(
            path,
            checkpoint,
            on_mesh=self.array_of,
            facts=facts_of(checkpoint),
            wait=self.wait,
            directory=self._directory,
        )

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        from torch_compat.checkpoint.checkpoint_dict import load_checkpoint_dict
        from torch_compat.core.saving import read_checkpoint
        from xlatrain import checkpoint as sharded

        sharded.wait_for_save(path)
        if "://" not in str(path) and not os.path.exists(path):
            raise FileNotFoundError(
                f"Checkpoint file not found: {path} (ckpt_path is a path, or one of 'best', 'last', 'hpc', 'auto'); `xlatrain "
                f"ckpt ls {os.path.dirname(path) or '.'}` lists its neighbours"
            )
        if map_location is not None or not sharded.is_checkpoint(path):
            return read_checkpoint(path, map_location=map_location, weights_only=weights_only)
        # Lazily: each array goes from a directory onto the shards of whoever takes it up, and nowhere else.
        return load_checkpoint_dict(path, weights_only=weights_only is not False, lazy=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        from xlatrain import checkpoint as sharded

        sharded.wait_for_save(path)
        if "://" in str(path) and not sharded.is_checkpoint_directory(path):
            super().remove_checkpoint(path)
            return
        path = Path(path) if "://" not in str(path) else path
        if isinstance(path, Path) and (path.is_file() or path.is_symlink()):
            path.unlink()
        elif sharded.is_checkpoint_directory(path):
            sharded.remove(path)
        elif isinstance(path, Path) and path.exists():
            raise MisconfigurationException(f"{path} is not a checkpoint; it was not deleted")

    def teardown(self) -> None:
        if self.pending is not None:
            self.pending.wait()


def facts_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Step, epoch and the score that a ModelCheckpoint saved it for: what ``xlatrain ckpt ls`` shows and prunes by."""
    facts = {
        short: int(checkpoint[name])
        for short, name in (("step", "global_step"), ("epoch", "epoch"))
        if isinstance(checkpoint.get(name), int)
    }
    metrics = {}
    for state in (checkpoint.get("callbacks") or {}).values():
        if isinstance(state, dict) and state.get("monitor") and state.get("current_score") is not None:
            metrics[str(state["monitor"])] = float(state["current_score"])
    return {**facts, "metrics": metrics} if metrics else facts
