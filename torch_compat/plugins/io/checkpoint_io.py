"""The interface of checkpoint plugins. API: ``lightning.fabric.plugins.io.CheckpointIO``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar


class CheckpointIO(ABC):
    """Writes, reads and removes checkpoints; give one as ``Trainer(plugins=[…])`` or ``Strategy(checkpoint_io=…)``.

    Attributes:
        collective: whether every process calls it, with the arrays still on the mesh. A plugin of the user's has False: it
            is called on process 0 only to save and to remove, and gets a dict of plain CPU tensors, gathered from all shards.
    """

    collective: ClassVar[bool] = False

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``.

        Args:
            checkpoint: model and trainer state.
            path: where to.
            storage_options: what ``Trainer.save_checkpoint(storage_options=…)`` was given.
        """

    @abstractmethod
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint at ``path``; called on every process.

        Args:
            path: what :meth:`save_checkpoint` was given.
            map_location: as for ``torch.load``.
            weights_only: as for ``torch.load``; None is its default.
        """

    @abstractmethod
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint at ``path``."""

    def teardown(self) -> None:  # noqa: B027
        """Called once at the end of a run: wait for what is still being written."""
