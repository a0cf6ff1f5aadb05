"""The smallest models and data that make a run (``lightning.pytorch.demos.boring_classes``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule
from torch_compat.utilities.types import STEP_OUTPUT


class RandomDictDataset(Dataset[dict[str, Tensor]]):
    """``length`` dicts ``{"a": x, "b": x + 2}`` with ``x`` a normal vector of ``size`` numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        a = self.data[index]
        return {"a": a, "b": a + 2}

    def __len__(self) -> int:
        return self.len


class RandomDataset(Dataset[Tensor]):
    """``length`` normal vectors of ``size`` numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomIterableDataset(IterableDataset[Tensor]):
    """``count`` normal vectors of ``size`` numbers, without a length."""

    def __init__(self, size: int, count: int) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            yield torch.randn(self.size)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """A :class:`RandomIterableDataset` with a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """A linear layer from 32 to 2 numbers; the loss is the mean squared difference from ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            labels = torch.ones_like(preds)
        return F.mse_loss(preds, labels)

    def step(self, batch: Tensor) -> Tensor:
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomDataset(32, 64))

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomDataset(32, 64))

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomDataset(32, 64))

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomDataset(32, 64))


class _OneLoaderEach(LightningDataModule):
    """A loader for each stage, of what ``setup`` makes."""

    random_train: Dataset[Tensor]
    random_val: Dataset[Tensor]
    random_test: Dataset[Tensor]
    random_predict: Dataset[Tensor]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.random_train)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.random_val)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.random_predict)


class BoringDataModule(_OneLoaderEach):
    """A data module of 64 random vectors for each of fit, validate, test and predict, each a quarter of one dataset."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full: Dataset[Tensor] = RandomDataset(32, 64 * 4)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.random_train = self._quarter(0)
        if stage in ("fit", "validate"):
            self.random_val = self._quarter(1)
        if stage == "test":
            self.random_test = self._quarter(2)
        if stage == "predict":
            self.random_predict = self._quarter(3)

    def _quarter(self, index: int) -> Subset[Tensor]:
        return Subset(self.random_full, indices=range(index * 64, (index + 1) * 64))


class BoringDataModuleNoLen(_OneLoaderEach):
    """Iterable datasets without a length: 512 vectors to fit, 128 to validate, 256 to test, 64 to predict."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.random_train = RandomIterableDataset(32, 512)
        if stage in ("fit", "validate"):
            self.random_val = RandomIterableDataset(32, 128)
        if stage == "test":
            self.random_test = RandomIterableDataset(32, 256)
        if stage == "predict":
            self.random_predict = RandomIterableDataset(32, 64)


class IterableBoringDataModule(LightningDataModule):
    """Two loaders per stage, one over a map-style dataset and one over an iterable one."""

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self.train_datasets = _map_and_iterable(16)
        if stage in ("fit", "validate"):
            self.val_datasets = _map_and_iterable(32)
        if stage == "test":
            self.test_datasets = _map_and_iterable(64)
        if stage == "predict":
            self.predict_datasets = _map_and_iterable(128)

    def train_dataloader(self) -> list[DataLoader[Tensor]]:
        return [DataLoader(dataset) for dataset in self.train_datasets]

    def val_dataloader(self) -> list[DataLoader[Tensor]]:
        return [DataLoader(dataset) for dataset in self.val_datasets]

    def test_dataloader(self) -> list[DataLoader[Tensor]]:
        return [DataLoader(dataset) for dataset in self.test_datasets]

    def predict_dataloader(self) -> list[DataLoader[Tensor]]:
        return [DataLoader(dataset) for dataset in self.predict_datasets]


def _map_and_iterable(count: int) -> list[Dataset[Tensor]]:
    return [RandomDataset(4, count), RandomIterableDataset(4, count)]


class ManualOptimBoringModel(BoringModel):
    """:class:`BoringModel` with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> STEP_OUTPUT:
        opt = self.optimizers()
        loss = self.step(batch)
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        return loss


class DemoModel(LightningModule):
    """A linear layer with a choosable output size and learning rate."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_nb: int) -> STEP_OUTPUT:
        x = self(batch)
        return x.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Net(nn.Module):
    """A small CNN for images of shape (batch, 1, 28, 28); gives log probabilities of 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)
