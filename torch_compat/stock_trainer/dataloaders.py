"""Loaders of stock's loops with the batches of the whole mesh."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import DataLoader

from torch_compat.strategies.strategy import Strategy
from torch_compat.trainer.data.dataloaders import prepare_dataloader


def global_batches(loader: Any, trainer: Any, strategy: Strategy) -> Any:
    """The loader to iterate instead of ``loader``; see :func:`~torch_compat.trainer.data.dataloaders.prepare_dataloader`.

    For predictions stock has put its own batch sampler around the user's, which notes the indices of each batch: it goes around
    the batches of the whole mesh.
    """
    noting: Any = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if noted := isinstance(noting, _IndexBatchSamplerWrapper):
        loader = _with_batches(loader, noting._batch_sampler)
    prepared = prepare_dataloader(
        loader,
        strategy.data_parallel_size,
        mode="train" if trainer.training else "validate",
        use_distributed_sampler=trainer._accelerator_connector.use_distributed_sampler,
        overfit=bool(trainer.overfit_batches),
        layout=strategy.layout,
        world_size=strategy.world_size,
    )
    return _with_batches(prepared, _IndexBatchSamplerWrapper(prepared.batch_sampler)) if noted else prepared


def _with_batches(loader: Any, batch_sampler: Any) -> Any:
    """A copy of a loader with another batch sampler, which DataLoader lets nobody assign."""
    made = copy.copy(loader)
    made.__dict__.update(batch_sampler=batch_sampler, _iterator=None)
    return made
