"""The demonstration models and data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    IterableBoringDataModule,
    ManualOptimBoringModel,
    Net,
    RandomDictDataset,
    RandomIterableDataset,
    RandomIterableDatasetWithLen,
)


@pytest.mark.parametrize(
    ("cls", "sizes"),
    [
        (BoringDataModule, {"train": [64], "val": [64], "test": [64], "predict": [64]}),
        (BoringDataModuleNoLen, {"train": [512], "val": [128], "test": [256], "predict": [64]}),
        (IterableBoringDataModule, {"train": [16, 16], "val": [32, 32], "test": [64, 64], "predict": [128, 128]}),
    ],
)
def test_batches_of_each_stage(cls: type[LightningDataModule], sizes: dict[str, list[int]]) -> None:
    data = cls()
    for stage in ("fit", "validate", "test", "predict"):
        data.setup(stage)
    for stage, expected in sizes.items():
        loaders = getattr(data, f"{stage}_dataloader")()
        loaders = loaders if isinstance(loaders, list) else [loaders]
        assert [sum(1 for _ in loader) for loader in loaders] == expected


def test_a_stage_sets_up_only_what_it_needs() -> None:
    data = BoringDataModule()
    data.setup("fit")
    assert hasattr(data, "random_train")
    assert hasattr(data, "random_val")
    assert not hasattr(data, "random_test")


def test_the_quarters_of_a_dataset_are_apart() -> None:
    data = BoringDataModule()
    for stage in ("fit", "test", "predict"):
        data.setup(stage)
    rows = [torch.cat(list(getattr(data, f"{stage}_dataloader")())) for stage in ("train", "val", "test", "predict")]
    assert len(torch.cat(rows).unique(dim=0)) == 256


def test_datasets() -> None:
    row: Any = RandomDictDataset(3, 5)[4]
    torch.testing.assert_close(row["b"], row["a"] + 2)
    assert len(RandomIterableDatasetWithLen(3, 5)) == len(list(RandomIterableDataset(3, 5))) == 5


@pytest.mark.parametrize("cls", [BoringModel, ManualOptimBoringModel])
def test_boring_models(cls: type[BoringModel]) -> None:
    model = cls()
    batch = torch.ones(2, 32)
    expected = ((model(batch) - 1) ** 2).mean()
    torch.testing.assert_close(model.validation_step(batch, 0), {"x": expected})
    torch.testing.assert_close(model.test_step(batch, 0), {"y": expected})
    (optimizer,), (scheduler,) = model.configure_optimizers()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.optimizer is optimizer
    assert model.automatic_optimization is (cls is BoringModel)


def test_demo_model() -> None:
    model = DemoModel(out_dim=3, learning_rate=0.5)
    loss = model.training_step(torch.ones(2, 4, 8), 0)
    assert isinstance(loss, torch.Tensor)
    assert loss.shape == ()
    assert model.configure_optimizers().param_groups[0]["lr"] == 0.5


def test_net_gives_log_probabilities() -> None:
    probabilities = Net().eval()(torch.rand(2, 1, 28, 28)).exp()
    torch.testing.assert_close(probabilities.sum(1), torch.ones(2))
