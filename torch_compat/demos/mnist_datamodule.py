"""Handwritten digits. API: ``lightning.pytorch.demos.mnist_datamodule``."""

from __future__ import annotations

import os
import platform
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split

from torch_compat.core.datamodule import LightningDataModule
from torch_compat.utilities.imports import _TORCHVISION_AVAILABLE

_DATASETS_PATH = "./data"
_MEAN_AND_STD = (0.1307, 0.3081)


class _MNIST(Dataset[tuple[Tensor, int]]):
    """MNIST without torchvision: images float32 ``[28, 28]``, labels int.

    Args:
        root: the folder below which ``MNIST/processed/training.pt`` and ``test.pt`` lie.
        train: the 60,000 for training, or the 10,000 for testing.
        normalize: mean and standard deviation that become 0 and 1; None leaves 0 to 255.
        download: fetch files that are missing.

    Raises:
        RuntimeError: a file is missing and ``download`` is False.
    """

    RESOURCES = (
        "https://pl-public-data.s3.amazonaws.com/MNIST/processed/training.pt",
        "https://pl-public-data.s3.amazonaws.com/MNIST/processed/test.pt",
    )
    TRAIN_FILE_NAME = "training.pt"
    TEST_FILE_NAME = "test.pt"
    cache_folder_name = "complete"

    def __init__(
        self,
        root: str,
        train: bool = True,
        normalize: tuple[float, float] | None = _MEAN_AND_STD,
        download: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.root = root
        self.train = train
        self.normalize = normalize
        self.prepare_data(download)
        name = self.TRAIN_FILE_NAME if train else self.TEST_FILE_NAME
        self.data, self.targets = torch.load(Path(self.cached_folder_path) / name, weights_only=True)

    def __getitem__(self, idx: int) -> tuple[Tensor, int]:
        image = self.data[idx].float().unsqueeze(0)
        if self.normalize is not None and len(self.normalize) == 2:
            image = self.normalize_tensor(image, *self.normalize)
        return image, int(self.targets[idx])

    def __len__(self) -> int:
        return len(self.data)

    @property
    def cached_folder_path(self) -> str:
        """The directory of the files."""
        return os.path.join(self.root, "MNIST", self.cache_folder_name)

    def _check_exists(self, data_folder: str) -> bool:
        return all(os.path.isfile(os.path.join(data_folder, name)) for name in (self.TRAIN_FILE_NAME, self.TEST_FILE_NAME))

    def prepare_data(self, download: bool = True) -> None:
        """Fetch what is missing, if that is allowed."""
        if download and not self._check_exists(self.cached_folder_path):
            self._download(self.cached_folder_path)
        if not self._check_exists(self.cached_folder_path):
            raise RuntimeError(f"MNIST was not found in {self.cached_folder_path}; pass download=True")

    def _download(self, data_folder: str) -> None:
        os.makedirs(data_folder, exist_ok=True)
        for url in self.RESOURCES:
            part = os.path.join(data_folder, f"{os.path.basename(url)}.{os.getpid()}")
            urllib.request.urlretrieve(url, part)
            os.replace(part, os.path.join(data_folder, os.path.basename(url)))  # whole, or not there

    @staticmethod
    def normalize_tensor(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """``tensor`` shifted by ``mean`` and divided by ``std``."""
        return (tensor - mean) / std


def MNIST(*args: Any, **kwargs: Any) -> Dataset[Any]:
    """torchvision's dataset where torchvision is installed, else :class:`_MNIST`."""
    if not _TORCHVISION_AVAILABLE:
        return _MNIST(*args, **kwargs)
    from torchvision.datasets import MNIST as torchvisions  # pyright: ignore[reportMissingImports]

    return torchvisions(*args, **kwargs)


class MNISTDataModule(LightningDataModule):
    """MNIST, its training images split into training and validation.

    Args:
        data_dir: where the files lie or come to lie.
        val_split: number of images for validation.
        num_workers: of each DataLoader; 0 on Windows.
        normalize: mean 0 and standard deviation 1 (with torchvision; without it they always are).
        seed: of the split.
        batch_size: of each DataLoader.
    """

    name = "mnist"

    def __init__(
        self,
        data_dir: str = _DATASETS_PATH,
        val_split: int = 5000,
        num_workers: int = 16,
        normalize: bool = False,
        seed: int = 42,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.data_dir = data_dir
        self.val_split = val_split
        self.num_workers = 0 if platform.system() == "Windows" else num_workers
        self.normalize = normalize
        self.seed = seed
        self.batch_size = batch_size
        self.dataset_train: Dataset[Any]  # of setup
        self.dataset_val: Dataset[Any]

    @property
    def num_classes(self) -> int:
        """Ten digits."""
        return 10

    def prepare_data(self) -> None:
        for train in (True, False):
            MNIST(self.data_dir, train=train, download=True)

    def setup(self, stage: str) -> None:
        transform = {} if self.default_transforms is None else {"transform": self.default_transforms}
        dataset: Any = MNIST(self.data_dir, train=True, download=False, **transform)
        sizes = [len(dataset) - self.val_split, self.val_split]
        self.dataset_train, self.dataset_val = random_split(dataset, sizes, torch.Generator().manual_seed(self.seed))

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.dataset_train, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.dataset_val, shuffle=False, drop_last=True)

    def test_dataloader(self) -> DataLoader[Any]:
        transform = {} if self.default_transforms is None else {"transform": self.default_transforms}
        dataset = MNIST(self.data_dir, train=False, download=False, **transform)
        return self._loader(dataset, shuffle=False, drop_last=True)

    def _loader(self, dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=self.batch_size, num_workers=self.num_workers, pin_memory=True, **options)

    @property
    def default_transforms(self) -> Callable[..., Any] | None:
        """The transforms that torchvision's dataset applies; None without torchvision."""
        if not _TORCHVISION_AVAILABLE:
            return None
        from torchvision import transforms  # pyright: ignore[reportMissingImports]

        steps = [transforms.ToTensor()]
        if self.normalize:
            steps.append(transforms.Normalize(mean=(0.5,), std=(0.5,)))
        return transforms.Compose(steps)
