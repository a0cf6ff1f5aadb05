"""LightningDataModule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.demos.boring_classes import BoringDataModule, RandomDataset, RandomIterableDataset
from torch_compat.utilities.exceptions import MisconfigurationException


class TestFromDatasets:
    def test_only_training_is_shuffled(self) -> None:
        data = LightningDataModule.from_datasets(RandomDataset(2, 8), RandomDataset(2, 4), batch_size=3)
        train, val = data.train_dataloader(), data.val_dataloader()
        assert isinstance(train.sampler, RandomSampler)
        assert isinstance(val.sampler, SequentialSampler)
        assert (train.batch_size, train.num_workers, train.pin_memory) == (3, 0, True)
        with pytest.raises(MisconfigurationException, match="`test_dataloader` must be implemented"):
            data.test_dataloader()

    def test_several_and_iterable_datasets(self) -> None:
        data = LightningDataModule.from_datasets(
            RandomIterableDataset(2, 8), [RandomDataset(2, 4)] * 2, predict_dataset={"a": RandomDataset(2, 4)}
        )
        assert len(list(data.train_dataloader())) == 8
        assert [type(loader) for loader in data.val_dataloader()] == [DataLoader, DataLoader]
        assert list(data.predict_dataloader()) == ["a"]

    def test_arguments_of_init(self) -> None:
        class Data(LightningDataModule):
            def __init__(self, batch_size: int, root: str = "") -> None:
                super().__init__()
                self.save_hyperparameters()

        assert Data.from_datasets(RandomDataset(2, 8), batch_size=5, root="x").hparams == {"batch_size": 5, "root": "x"}

    def test_arguments_of_init_with_keywords(self) -> None:
        class Data(LightningDataModule):
            def __init__(self, **kwargs: Any) -> None:
                super().__init__()
                self.given = kwargs

        assert Data.from_datasets(RandomDataset(2, 8), foo=1).given == {"batch_size": 1, "num_workers": 0, "foo": 1}


def test_str_tells_sizes_without_setup() -> None:
    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return {"a": DataLoader(RandomIterableDataset(2, 8)), "b": [DataLoader(RandomDataset(2, 4))]}

        def val_dataloader(self) -> Any:
            return DataLoader(self.made_in_setup)

    assert str(Data()) == (
        "{Train dataloader: 1. size=NA ; 2. size=4}\n{Validation dataloader: None}\n{Test dataloader: None}\n"
        "{Predict dataloader: None}"
    )
    assert str(BoringDataModule()).count("None") == 4


def test_defaults() -> None:
    data = LightningDataModule()
    assert data.state_dict() == {}
    assert data.trainer is None
    assert data.name is None
    assert data.prepare_data_per_node
    batch = [torch.zeros(1)]
    assert data.on_before_batch_transfer(batch, 0) is batch
    assert data.on_after_batch_transfer(batch, 0) is batch
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        LightningDataModule(batch_size=3)
