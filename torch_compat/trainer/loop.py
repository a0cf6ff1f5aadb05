"""The common base of all loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_compat.trainer.stock_names import refuse_private_loop_methods

if TYPE_CHECKING:
    from torch_compat.trainer.data.data_source import DataSource, _DataLoaderSource
    from torch_compat.trainer.trainer import Trainer


class Loop:
    """A loop of a Trainer. API: ``lightning.pytorch.loops.loop._Loop``.

    Args:
        trainer: whose loop it is.

    Attributes:
        source: the loop's loaders.

    Raises:
        MisconfigurationException: a subclass overrides what only stock calls.
    """

    source: DataSource

    def __init__(self, trainer: Trainer) -> None:
        refuse_private_loop_methods(self)
        self._trainer = trainer

    @property
    def trainer(self) -> Trainer:
        """The Trainer that the loop belongs to."""
        return self._trainer

    def _look(self) -> None:
        """Raise where a step went wrong inside its program, of those that have ended."""
        self._trainer.executor.look()

    @property
    def _data_source(self) -> _DataLoaderSource:
        """Where the loop's loaders come from, as stock's loops describe it."""
        return self.source.stock_view
