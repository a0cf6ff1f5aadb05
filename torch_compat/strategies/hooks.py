"""The hooks of a strategy. API: ``lightning.pytorch.strategies.Strategy`` 2.6."""

from __future__ import annotations

from typing import Any


class StrategyHooks:
    """The hooks of a strategy: called on every process, on the host, where a subclass overrides them."""

    def on_train_start(self) -> None:
        """Called after the hook of the same name."""

    def on_train_end(self) -> None:
        """Called after the hook of the same name."""

    def on_validation_start(self) -> None:
        """Called after the hook of the same name."""

    def on_validation_end(self) -> None:
        """Called after the hook of the same name."""

    def on_test_start(self) -> None:
        """Called after the hook of the same name."""

    def on_test_end(self) -> None:
        """Called after the hook of the same name."""

    def on_predict_start(self) -> None:
        """Called after the hook of the same name."""

    def on_predict_end(self) -> None:
        """Called after the hook of the same name."""

    def on_train_epoch_end(self) -> None:
        """Called after the hook of the same name. (Era 1.3.)"""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called after the hook of the same name, before anything happens for the batch."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when a run ends with an exception."""
