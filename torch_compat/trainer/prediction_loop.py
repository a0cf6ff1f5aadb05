"""The prediction loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torch_compat.callbacks.prediction_writer import BasePredictionWriter
from torch_compat.run import hook_calls as call
from torch_compat.run import profiling
from torch_compat.run.batches import is_like_plain, map_tensors
from torch_compat.trainer.announcement import announce
from torch_compat.trainer.counters import Stage, counts
from torch_compat.trainer.data.data_source import DataSource, read_ahead
from torch_compat.trainer.loop import Loop
from torch_compat.trainer.progress import _ProcessedTracker, _Progress
from torch_compat.utilities.rank_zero import WarningCache
from xlatrain.bridge.tensors.lazy import read_lazy

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

_warnings = WarningCache()


class PredictionLoop(Loop):
    """Runs ``predict_step`` over all loaders and keeps what it returns."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.source = DataSource(trainer, "predict", "sequential")
        self.max_batches: list[int | float] = []
        self.return_predictions = True
        self._none_predicted = WarningCache()
        self._predictions: list[list[Any]] = []
        self.epoch_batch_indices: list[list[list[int]]] = []
        self.current_batch_indices: list[int] = []
        self._done = 0
        self._batch_stage = Stage.NONE
        self._first: Iterator[Any] | None = None  # the batches of the first loader, before a pass takes them

    @property
    def batch_progress(self) -> _Progress:
        """Counts of batches."""
        return _Progress(*(_ProcessedTracker(**counts(self._done, self._batch_stage)) for _ in range(2)))

    @property
    def num_dataloaders(self) -> int:
        """The number of loaders."""
        return 0 if self.source.combined is None else len(self.source.combined.flattened)

    @property
    def predictions(self) -> list[Any]:
        """The predictions kept so far: a list of batches, or a list of such lists for several loaders."""
        return self._predictions[0] if len(self._predictions) == 1 else self._predictions

    def setup_data(self) -> None:
        self.source.load()
        self.max_batches = self.source.limit(self._trainer.limit_predict_batches)
        if not self.source.is_sequential:
            raise ValueError(
                '`trainer.predict()` only supports the `CombinedLoader(mode="sequential")` mode, one loader after another; a '
                "list of loaders is combined so"
            )

    def begin_again(self) -> None:
        """Load the loaders again, in a hook at the beginning of a pass, and begin it with them."""
        self.setup_data()
        self._first = self._begin(0)

    def set_return_predictions(self, wanted: bool | None) -> None:
        """``return_predictions`` of ``Trainer.predict``: True unless a run's results go elsewhere."""
        self.return_predictions = True if wanted is None else wanted

    def run(self) -> Any:
        """Run a pass; returns the predictions: a list of batches, a list of such lists for several loaders; None of none."""
        trainer = self._trainer
        if trainer.limit_predict_batches == 0:
            return None
        self.setup_data()
        if not sum(self.max_batches):
            return None
        self._predictions = [[] for _ in self.max_batches]
        self._done = 0
        self.epoch_batch_indices = [[] for _ in self.max_batches]
        self.source.set_epoch(trainer.current_epoch)
        with torch.no_grad():
            self._first = self._begin(0)  # before the hooks, as in stock
            modes = {module: module.training for module in trainer.lightning_module.modules()}
            call.module_hook(trainer, "on_predict_model_eval")
            call.hooks(trainer, "on_predict_start")
            call.hooks(trainer, "on_predict_epoch_start")
            on_start = call.BoundHook(trainer, "on_predict_batch_start")
            on_end = call.BoundHook(trainer, "on_predict_batch_end")
            first, self._first = self._first, None
            assert first is not None
            for index, limit in enumerate(self.max_batches):
                self._run_loader(self._begin(index) if index else first, index, limit, on_start, on_end)
            results = self._end()
            for module, mode in modes.items():
                if module.training != mode:
                    module.training = mode
        return results

    def _begin(self, index: int) -> Iterator[Any]:
        assert self.source.combined is not None
        batches = self._trainer.executor.batches(self.source.combined.flattened[index], "predict_dataloader")
        return read_ahead(batches, reads=self.source.length() == float("inf"))

    def _run_loader(
        self, batches: Iterator[Any], index: int, limit: int | float, on_start: call.BoundHook, on_end: call.BoundHook
    ) -> None:
        assert self.source.combined is not None
        trainer = self._trainer
        loader = self.source.combined.flattened[index]
        several = len(self.max_batches) > 1
        if limit == 0:
            return
        for batch_idx, batch in enumerate(profiling.profiled_batches(trainer, "[_PredictionLoop].predict_next", batches)):
            self.current_batch_indices = self._indices(loader, batch_idx)
            batch = trainer.transfer(batch, index)
            indices = (batch_idx, index) if several else (batch_idx,)
            self._batch_stage = Stage.READY
            if on_start:
                on_start(batch, *indices)
            self._batch_stage = Stage.STARTED
            with profiling.strategy_action(trainer, "predict_step"):
                outcome = trainer.executor.evaluate("predict_step", batch, indices)
            self._batch_stage = Stage.PROCESSED
            if on_end:
                on_end(outcome.result, batch, *indices)
            if not trainer.run_time.announced:
                announce(trainer)
            self._batch_stage = Stage.NONE
            self._done += 1
            if outcome.result is None:
                self._none_predicted.warn(
                    "predict returned None if it was on purpose, ignore this warning: the list has None for that batch."
                )
            self._keep(index, outcome.result)
            if batch_idx + 1 >= limit:
                return

    def _indices(self, loader: Any, batch_idx: int) -> list[int]:
        """The indices of the batch's samples in the dataset, where the batch sampler tells them; else empty."""
        seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", None)
        if seen is None:
            _warnings.warn(
                f"Couldn't infer the batch indices fetched from your dataloader: `{type(loader).__name__}`: writers get none"
            )
        return list(seen[batch_idx]) if seen is not None and batch_idx < len(seen) else []

    def _keep(self, index: int, result: Any) -> None:
        if self.current_batch_indices:
            self.epoch_batch_indices[index].append(self.current_batch_indices)
        if self.return_predictions or any(
            isinstance(callback, BasePredictionWriter) and callback.interval.on_epoch for callback in self._trainer.callbacks
        ):
            self._predictions[index].append(_on_host(result))

    def _end(self) -> Any:
        trainer = self._trainer
        call.hooks(trainer, "on_predict_epoch_end")
        call.hooks(trainer, "on_predict_end")
        self.epoch_batch_indices = []
        if not self.return_predictions:
            self._predictions = []
            return None
        return self.predictions


def _on_host(result: Any) -> Any:
    """Predictions as ordinary CPU tensors, so that they outlive the run; those that are such, as in stock, are the step's own."""
    return map_tensors(_outliving, result)


def _outliving(tensor: torch.Tensor) -> torch.Tensor:
    read_lazy(tensor)
    if not is_like_plain(type(tensor)):
        return tensor
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not tensor.requires_grad
    return tensor if plain else tensor.detach().cpu().clone()
