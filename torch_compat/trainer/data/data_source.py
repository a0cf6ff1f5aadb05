"""The sources of a loop's batches: loaders given to the Trainer or by a hook, re-batched for the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule
from torch_compat.run import hook_calls as call
from torch_compat.run.profiling import profiled_hook
from torch_compat.trainer.data.dataloaders import prepare_dataloader
from torch_compat.trainer.data.epoch_batches import EpochBatches
from torch_compat.trainer.data.workers import warn_of_workers
from torch_compat.trainer.jax_modules import check_loaders
from torch_compat.utilities.combined_loader import CombinedLoader
from torch_compat.utilities.data import ITERABLE_WITH_LENGTH, _set_sampler_epoch, has_iterable_dataset, sized_len
from torch_compat.utilities.exceptions import ArgumentTypeError, MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer


class DataSource:
    """The loaders of one stage.

    Args:
        trainer: asked for its module, datamodule and strategy when loading.
        prefix: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``: the hook is ``{prefix}_dataloader``.
        mode: of the :class:`CombinedLoader`, ``"max_size_cycle"`` for training and ``"sequential"`` otherwise.

    Attributes:
        loaded_at_epoch: when the loaders were asked for, as ``reload_dataloaders_every_n_epochs`` counts.
    """

    def __init__(self, trainer: Trainer, prefix: str, mode: str) -> None:
        self._trainer = trainer
        self.prefix = prefix
        self.mode = mode
        self.given: Any = None
        self.combined: CombinedLoader | None = None
        self.loaded_at_epoch = -math.inf

    def reset(self, given: Any) -> None:
        """Forget the loaders; ``given`` are loaders passed to ``fit`` and its like, or None for the hook."""
        self.given = given
        self.combined = None
        self.loaded_at_epoch = -math.inf

    @property
    def owner(self) -> Any:
        """The owner of the hooks that give the loaders: the data module where the run has one, even if it has no such hook."""
        datamodule = self._trainer.run_datamodule
        return self._trainer.lightning_module if datamodule is None else datamodule

    @property
    def is_defined(self) -> bool:
        """Whether there is anything to load."""
        return self.given is not None or call.is_overridden(f"{self.prefix}_dataloader", self.owner)

    @property
    def stock_view(self) -> _DataLoaderSource:
        """The source as stock's loops describe it."""
        instance = self.owner if self.given is None else self.given
        return _DataLoaderSource(instance, f"{self.prefix}_dataloader")

    def count(self) -> int:
        """Ask for the loaders, and only say how many there are."""
        return len(self._combined(self._ask()).flattened)

    def _combined(self, loaders: Any) -> CombinedLoader:
        return loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, self.mode)  # pyright: ignore[reportArgumentType]

    def load(self) -> CombinedLoader:
        """Ask for the loaders (again) and prepare each for the mesh.

        Raises:
            TypeError: something that cannot be iterated.
            MisconfigurationException: nothing was returned.
        """
        loaders = self._ask()
        combined = self._combined(loaders)
        check_loaders(self._trainer.lightning_module, combined.flattened, f"{self.prefix}_dataloader")
        if not combined.flattened:
            _warn_of_no_batches(loaders)
        elif all(one is None for one in combined.flattened):
            raise ArgumentTypeError(
                f"An invalid dataloader was returned from `{type(self.owner).__name__}.{self.prefix}_dataloader()`. Found "
                f"{loaders}; expected a DataLoader or another iterable of batches"
            )
        combined.flattened = [self._prepare(one) for one in combined.flattened]
        self.combined = combined
        return combined

    def _ask(self) -> Any:
        if self.given is not None:
            return self.given
        name = f"{self.prefix}_dataloader"
        call.old_hooks(self._trainer, f"on_{name}")
        if self._trainer.run_datamodule is not None:
            loaders = profiled_hook(self._trainer, self.owner, name)()
        else:
            loaders = call.module_hook(self._trainer, name)
        self._trainer.strategy.barrier(name)
        return loaders

    def _origin(self) -> str:
        """The origin of the loaders, for messages."""
        trainer, name = self._trainer, f"{self.prefix}_dataloader"
        if self.given is not None:
            argument = (
                {"train": "train_dataloaders", "val": "val_dataloaders"}.get(self.prefix) if trainer.state.fn == "fit" else None
            )
            return f"passed to `Trainer.{getattr(trainer.state.fn, 'value', 'fit')}({argument or 'dataloaders'}=...)`"
        return f"returned from `{type(self.owner).__name__}.{name}()`"

    def _prepare(self, loader: Any) -> Any:
        if not isinstance(loader, Iterable):
            raise TypeError(
                f"An invalid dataloader was {self._origin()}. Found {loader!r}, which is not iterable; expected a DataLoader or "
                "another iterable of batches"
            )
        trainer = self._trainer
        if isinstance(loader, DataLoader):
            self._check(loader)
        prepared = prepare_dataloader(
            loader,
            trainer.strategy.data_parallel_size,
            mode={"train": "train", "val": "validate"}.get(self.prefix, self.prefix),
            use_distributed_sampler=trainer.use_distributed_sampler,
            overfit=trainer.overfit_batches > 0 and self.prefix in ("train", "val"),
            layout=trainer.strategy.layout,
            world_size=trainer.world_size,
        )
        prepared = getattr(trainer.strategy, f"on_reset_{self.prefix}_dataloader")(prepared)
        return trainer.strategy.process_dataloader(prepared)

    def _check(self, loader: DataLoader) -> None:
        warn_of_workers(loader, f"{self.prefix}_dataloader", reloads=self._trainer.reload_dataloaders_every_n_epochs > 0)
        if has_iterable_dataset(loader) and sized_len(loader) is not None:
            rank_zero_warn(ITERABLE_WITH_LENGTH)
        inner = getattr(loader.batch_sampler, "sampler", None)
        shuffles = isinstance(loader.sampler if inner is None else inner, RandomSampler)
        if shuffles and self.prefix != "train" and not (self.prefix == "val" and self._trainer.overfit_batches > 0):
            rank_zero_warn(
                f"Your `{self.prefix}_dataloader`'s sampler has shuffling enabled, it is strongly recommended that you turn "
                "shuffling off (`shuffle=False`): evaluation sees its samples in another order each time.",
                category=PossibleUserWarning,
            )

    def warn_of_no_batches(self) -> None:
        """Warn that the loaders together have no batches."""
        _warn_of_no_batches(self.combined)

    def limit(self, limit: int | float) -> list[int | float]:
        """Let through what ``limit_*_batches`` says of each loader, and return how many batches that are of each.

        Warns of a loader that has none.

        Raises:
            MisconfigurationException: a fraction of a loader without length, or one that leaves no batch.
        """
        assert self.combined is not None
        name = f"limit_{self.prefix}_batches"
        lengths = [length_of(one) for one in self.combined.flattened]
        for loader, length in zip(self.combined.flattened, lengths, strict=True):
            if length == 0:
                _warn_of_no_batches(loader)
        limits = [limited(length, limit, name) for length in lengths]
        self.combined.limits = limits
        return limits

    def length(self) -> int | float:
        """The number of batches of all loaders as they are combined, limits included; ``inf`` where it is not known."""
        assert self.combined is not None
        return self.combined._batches()

    def epoch_batches(self) -> EpochBatches:
        """The batches of a training epoch."""
        assert self.combined is not None
        reads_ahead = self.length() == float("inf")
        return EpochBatches(
            self.combined, reads_ahead=reads_ahead, draws_ahead=reads_ahead or self._trainer.strategy.layout.processes > 1
        )

    @property
    def is_sequential(self) -> bool:
        """Whether an evaluation takes one loader after another, as it does unless given a ``CombinedLoader`` of another mode."""
        assert self.combined is not None
        return self.combined._mode == "sequential"

    def passes(self, limits: list[int | float]) -> list[tuple[Any, int | float]]:
        """The iterables of an evaluation, one after the other, each with its number of batches; ``limits`` of each loader."""
        assert self.combined is not None
        self.combined.limits = limits
        if self.is_sequential:
            return list(zip(self.combined.flattened, limits, strict=True))
        return [(BatchesOf(self.combined), self.length())]

    def draw_as_begun(self) -> None:
        """Draw what the loaders' iterators draw from torch's generators when they are made."""
        assert self.combined is not None
        for loader in self.combined.flattened:
            if isinstance(loader, DataLoader):
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers of all loaders which epoch begins."""
        assert self.combined is not None
        for loader in self.combined.flattened:
            _set_sampler_epoch(loader, epoch)


@dataclass(frozen=True)
class _DataLoaderSource:
    """Where loaders come from. API: ``lightning.pytorch.trainer.connectors.data_connector._DataLoaderSource``.

    Attributes:
        instance: a LightningModule or LightningDataModule, or the loaders themselves; None before a run.
        name: of the hook: ``"train_dataloader"``.
    """

    instance: Any
    name: str

    def is_module(self) -> bool:
        """Whether a hook gives the loaders."""
        return isinstance(self.instance, LightningModule | LightningDataModule)

    def is_defined(self) -> bool:
        """Whether there are loaders, or a hook of the user's that gives them."""
        return not self.is_module() or call.is_overridden(self.name, self.instance)

    def dataloader(self) -> Any:
        """The loaders as the user gave them; calls the hook.

        Raises:
            RuntimeError: there is no run yet.
        """
        if self.instance is None:
            raise RuntimeError(f"{self.name}: no run has begun, so there are no loaders yet")
        return getattr(self.instance, self.name)() if self.is_module() else self.instance


class BatchesOf:
    """The batches of a combined loader, without their indices; its loaders' iterators are made by ``iter()``."""

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined = combined

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self._combined)


def _warn_of_no_batches(loaders: Any) -> None:
    rank_zero_warn(f"Total length of `{type(loaders).__name__}` across ranks is zero: there is nothing to run on.")


def length_of(loader: Any) -> int | float:
    """``len(loader)``, or ``inf`` where it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def limited(length: int | float, limit: int | float, name: str) -> int | float:
    """The number of batches out of ``length`` that ``limit_*_batches`` lets through.

    Raises:
        MisconfigurationException: a fraction of a loader without length, or one that leaves no batch.
    """
    if isinstance(limit, int) or limit == 0.0:
        return min(length, int(limit))
    if limit == 1.0:
        return length
    if length == float("inf"):
        raise MisconfigurationException(
            f"When using an `IterableDataset`, `Trainer({name})` must be `1.0` or an int, a number of batches; {limit} is a part "
            "of a length that the dataloader does not have"
        )
    count = int(length * limit)
    prefix = name.removeprefix("limit_").removesuffix("_batches")
    if count == 0 and length > 0:
        raise MisconfigurationException(
            f"You requested to check {limit} of the `{prefix}_dataloader` but {limit} * {length} < 1: less than one batch. Try "
            f"at least `{name}={1 / length}`, or a number of batches"
        )
    return count


def read_ahead(batches: Iterator[Any], *, reads: bool) -> Iterator[Any]:
    """``batches``; if ``reads``, each is drawn before the one before it is taken, the first one now."""
    return _ahead(batches, next(batches, _END)) if reads else batches


def _ahead(batches: Iterator[Any], drawn: Any) -> Iterator[Any]:
    while drawn is not _END:
        batch, drawn = drawn, next(batches, _END)
        yield batch


_END: Any = object()


def loaders_and_datamodule(loaders: Any, datamodule: Any, others: Any, fn: str) -> tuple[Any, LightningDataModule | None]:
    """Loaders and datamodule that a call of ``fn`` was given; a datamodule may be passed as loaders.

    Raises:
        MisconfigurationException: loaders and a datamodule.
    """
    if isinstance(loaders, LightningDataModule):
        return None, loaders
    if (loaders is not None or others is not None) and datamodule is not None:
        raise MisconfigurationException(
            "You cannot pass `train_dataloader` or `val_dataloaders` to `trainer.fit(datamodule=...)`; pass one of them"
            if fn == "fit"
            else f"You cannot pass both `trainer.{fn}(dataloaders=..., datamodule=...)`; pass one of them"
        )
    return loaders, datamodule
