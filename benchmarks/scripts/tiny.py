"""Host time of one step of a one-layer module: whole epochs of the Trainer, in turn with a bare jitted JAX loop."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from interleaved import parse_args, quiet_trainer, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH, LR = 8, 0.01


class Tiny(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class Rows(Dataset):
    """A dataset as a user writes it: a batch of its rows can only be made one by one."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)


DATASETS = {"tensors": TensorDataset, "rows": Rows}


class EpochTimes(pl.Callback):
    """Microseconds per step of every epoch, and of a bare loop run after each."""

    def __init__(self, bare: Callable[[], None] | None, steps: int) -> None:
        self.bare = bare
        self.steps = steps
        self.times: dict[str, list[float]] = {"trainer": [], "jax": []}
        self._began = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.layer.weight.detach().sum().item()  # waits for the last step
        self._note("trainer", self._began)
        if self.bare is not None:
            began = time.perf_counter()
            self.bare()
            self._note("jax", began)

    def _note(self, name: str, began: float) -> None:
        self.times[name].append(1e6 * (time.perf_counter() - began) / self.steps)

    def result(self) -> dict[str, Any]:
        """Medians over the epochs after the first."""
        return {"median_us": {name: float(np.median(times[1:])) for name, times in self.times.items() if times}}


def bare_loop(model: Tiny, loader: DataLoader) -> Callable[[], None]:
    """An epoch of the jitted step over the same loader, waiting at the end only."""
    from benchmarks.floors.tiny import make_step

    step = make_step({name: value.detach().numpy().copy() for name, value in model.state_dict().items()}, lr=LR)

    def epoch() -> None:
        loss = None
        for x, y in loader:
            loss = step(x.numpy(), y.numpy())
        assert loss is not None
        loss.block_until_ready()

    return epoch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default="tensors", choices=list(DATASETS))
    args = parse_args(parser)
    pl.seed_everything(0, verbose=False)
    model = Tiny()
    n = args.steps * BATCH
    loader = DataLoader(DATASETS[args.dataset](torch.randn(n, 32), torch.randn(n, 2)), BATCH)
    timing = EpochTimes(bare_loop(model, loader) if "jax" in args.lanes else None, args.steps)
    quiet_trainer(max_epochs=8, callbacks=[timing]).fit(model, loader)
    write(args.out, timing.result())


if __name__ == "__main__":
    main()
