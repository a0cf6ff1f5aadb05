"""A step of a small residual CNN with BatchNorm: the Trainer's, hand-written JAX's and eager torch's."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from interleaved import Interleaved, Lane, parse_args, quiet_trainer, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTHS, BATCH, SIZE, N_CLASSES, LR = (32, 64, 128), 32, 32, 10, 0.01


class Stage(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.skip = nn.Conv2d(n_in, n_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class CNN(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        pairs = zip((32, *WIDTHS), WIDTHS, strict=False)
        self.stages = nn.ModuleList(Stage(n_in, n_out, 1 if i == 0 else 2) for i, (n_in, n_out) in enumerate(pairs))
        self.head = nn.Linear(WIDTHS[-1], N_CLASSES)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)


def torch_lane(model: CNN) -> Lane:
    """Eager torch without any trainer."""
    model = copy.deepcopy(model)
    optimizer = model.configure_optimizers()

    def step(batch: Sequence[Tensor]) -> float:
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def jax_lane(model: CNN) -> Lane:
    """The same maths by hand."""
    from benchmarks.floors.cnn import make_step

    weights = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
    step = make_step(weights, n_stages=len(WIDTHS), lr=LR)
    return lambda batch: float(step(batch[0].numpy(), batch[1].int().numpy()))


def main() -> None:
    args = parse_args()
    pl.seed_everything(0, verbose=False)
    model = CNN()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(args.steps * BATCH, 3, SIZE, SIZE, generator=generator)
    data = TensorDataset(images, torch.randint(0, N_CLASSES, (len(images),), generator=generator))
    timing = Interleaved(list(DataLoader(data, BATCH)))
    trainer = quiet_trainer(max_epochs=1, callbacks=[timing])
    for name in args.lanes:
        timing.add(name, {"jax": jax_lane, "torch": torch_lane}[name](model))
    trainer.fit(model, DataLoader(data, BATCH))
    write(args.out, timing.result())


if __name__ == "__main__":
    main()
