"""LightningDataModule: data preparation and loaders in one reusable object.

API: ``lightning.pytorch.LightningDataModule`` 2.6.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from torch.utils.data import DataLoader, Dataset, IterableDataset

from torch_compat.core.class_method import class_method_only
from torch_compat.core.hooks import DataHooks
from torch_compat.core.hparams import HyperparametersMixin
from torch_compat.core.saving import MapLocation, load_from_checkpoint
from torch_compat.utilities.data import sized_len
from torch_compat.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

Datasets = Dataset[Any] | Iterable[Dataset[Any]]


class LightningDataModule(DataHooks, HyperparametersMixin):
    """Bundles ``prepare_data``, ``setup``, the loaders and ``teardown``.

    ::

        class Numbers(pl.LightningDataModule):
            def setup(self, stage):
                self.numbers = torch.randn(16, 32)

            def train_dataloader(self):
                return DataLoader(self.numbers, batch_size=2)

        trainer.fit(module, datamodule=Numbers())

    Attributes:
        name: for the user's own use.
        trainer: the Trainer that runs with this data module, or None.
    """

    name: str | None = None
    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trainer: Trainer | None = None

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Datasets | None = None,
        val_dataset: Datasets | None = None,
        test_dataset: Datasets | None = None,
        predict_dataset: Datasets | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> LightningDataModule:
        """A data module over given datasets.

        Args:
            train_dataset: a dataset, or datasets for several loaders; shuffled unless iterable.
            val_dataset: as ``train_dataset``, not shuffled.
            test_dataset: as ``val_dataset``.
            predict_dataset: as ``val_dataset``.
            batch_size: of every loader.
            num_workers: worker processes of every loader.
            **datamodule_kwargs: arguments of ``__init__``; ``batch_size`` and ``num_workers`` are added if it takes them.
        """
        parameters = inspect.signature(cls.__init__).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        loader_options: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers}
        # The base class forwards its **kwargs to mixins that know neither.
        candidates = {} if cls.__init__ is LightningDataModule.__init__ else loader_options
        accepted = {k: v for k, v in candidates.items() if k in parameters or takes_any}
        datamodule = cls(**{**accepted, **datamodule_kwargs})
        for stage, dataset, shuffle in (
            ("train", train_dataset, True),
            ("val", val_dataset, False),
            ("test", test_dataset, False),
            ("predict", predict_dataset, False),
        ):
            if dataset is not None:
                setattr(datamodule, f"{stage}_dataloader", _dataloader_method(dataset, shuffle, loader_options))
        return datamodule

    def state_dict(self) -> dict[str, Any]:
        """State to store in checkpoints, under the class's qualified name."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when the run is ended by an exception."""

    @class_method_only
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | IO[bytes],
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Makes a data module with the hyperparameters and the state in a checkpoint.

        Arguments and errors as in ``LightningModule.load_from_checkpoint``.
        """
        return load_from_checkpoint(  # pyright: ignore[reportReturnType]
            cls,
            checkpoint_path,
            map_location=map_location,
            hparams_file=hparams_file,
            strict=None,
            weights_only=weights_only,
            **kwargs,
        )

    def __str__(self) -> str:
        """The size of each loader's dataset, as far as it can tell without ``setup``."""
        rows = (("Train", "train"), ("Validation", "val"), ("Test", "test"), ("Predict", "predict"))
        return "\n".join(f"{{{label} dataloader: {_describe(self, stage)}}}" for label, stage in rows)


def _dataloader_method(datasets: Datasets, shuffle: bool, options: dict[str, Any]) -> Callable[[], Any]:
    def loader(dataset: Any) -> DataLoader[Any]:
        shuffled = shuffle and not isinstance(dataset, IterableDataset)
        return DataLoader(dataset, shuffle=shuffled, pin_memory=True, **options)

    def dataloader() -> Any:
        if isinstance(datasets, Mapping):
            return {key: loader(dataset) for key, dataset in datasets.items()}
        if isinstance(datasets, Sequence):
            return [loader(dataset) for dataset in datasets]
        return loader(datasets)

    return dataloader


def _describe(datamodule: LightningDataModule, stage: str) -> str:
    method = getattr(datamodule, f"{stage}_dataloader")
    if getattr(method, "__func__", None) is getattr(DataHooks, f"{stage}_dataloader"):
        return "None"
    try:
        loaders = method()
    except (MisconfigurationException, AttributeError, TypeError, NotImplementedError):
        # Loaders that need `setup` first have no size yet.
        return "None"
    if loaders is None:
        return "None"
    sizes = [_size(loader) for loader in _flatten(loaders)]
    if len(sizes) == 1:
        return f"size={sizes[0]}"
    return " ; ".join(f"{index}. size={size}" for index, size in enumerate(sizes, start=1))


def _flatten(loaders: Any) -> list[Any]:
    if isinstance(loaders, Mapping):
        return [leaf for value in loaders.values() for leaf in _flatten(value)]
    if isinstance(loaders, (list, tuple)):
        return [leaf for value in loaders for leaf in _flatten(value)]
    return [loaders]


def _size(loader: Any) -> str:
    length = sized_len(getattr(loader, "dataset", loader))
    return "NA" if length is None else str(length)
