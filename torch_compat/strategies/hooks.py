"""The hooks of a strategy. API: ``lightning.pytorch.strategies.Strategy`` 2.6."""

from __future__ import annotations

from typing import Any

from torch_compat.core.hooks import RunHooks


class StrategyHooks(RunHooks):
    """The hooks of a strategy: called on every process, on the host, after the module's, where a subclass overrides them."""

    def on_train_epoch_end(self) -> None:
        """Called after the hook of the same name. (Era 1.3.)"""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called after the hook of the same name, before anything happens for the batch."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when a run ends with an exception."""
