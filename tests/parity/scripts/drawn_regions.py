"""Parts of images and sequences whose places are drawn at random for each batch: one program."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from recording import Run, case, main, reported_runs
from torch import Tensor, nn

Loss = Callable[["Images", Tensor, Tensor], Tensor]


class Images(pl.LightningModule):
    """A small net of images of 8 by 8; ``how`` makes the loss of images and classes."""

    def __init__(self, how: Loss) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        self.cross_entropy = nn.CrossEntropyLoss()
        self.how, self.size = how, 6

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.cross_entropy(self.net(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.how(self, *batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def fit(run: Run, how: Loss) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(128, 3, 8, 8, generator=generator), torch.randint(0, 3, (128,), generator=generator)
    random.seed(3)
    np.random.seed(3)
    run.fit(Images(how), run.trainer(max_epochs=1), run.loader(x, y))
    run.note("few programs", [entry["variants"] <= 2 for entry in reported_runs()[-1:]] or [True])


def box_of(size: torch.Size, lam: float) -> tuple[int, int, int, int]:
    height, width = size[2], size[3]
    ratio = np.sqrt(1.0 - lam)
    h, w = int(height * ratio), int(width * ratio)
    y, x = np.random.randint(height), np.random.randint(width)
    return (
        np.clip(y - h // 2, 0, height),
        np.clip(x - w // 2, 0, width),
        np.clip(y + h // 2, 0, height),
        np.clip(x + w // 2, 0, width),
    )


@case
def boxes_of_other_images(run: Run) -> None:
    """CutMix."""

    def how(module: Images, x: Tensor, y: Tensor) -> Tensor:
        lam = np.random.beta(1.0, 1.0)
        other = torch.arange(len(x), device=x.device).flip(0)
        y1, x1, y2, x2 = box_of(x.size(), lam)
        x[:, :, y1:y2, x1:x2] = x[other, :, y1:y2, x1:x2]
        lam = 1 - (y2 - y1) * (x2 - x1) / (x.size(-1) * x.size(-2))
        out = module.net(x)
        return lam * module.cross_entropy(out, y) + (1 - lam) * module.cross_entropy(out, y[other])

    fit(run, how)


@case
def boxes_within_margins(run: Run) -> None:
    """Draws within limits that are drawn; a box of the flipped batch, another that is filled, one that is scaled."""

    def how(module: Images, x: Tensor, y: Tensor) -> Tensor:
        height = random.randint(1, 6)
        top, left = random.randint(0, 8 - height), max(random.randint(-3, 4), 0)
        x = x.clone()
        x[..., top : top + height, left : left + height] = 0
        x[:, :2, top:, :left] = x.flip(0)[:, :2, top:, :left] * 0.5 + 0.1
        x[:, 1:, -left - 1 :] *= 0.5
        x[0, None, :, left:, 3] += x[1, None, :, left:, 3].detach().abs()
        x[:, :, :top] = float(left)
        return module.loss(x, y) + 0.1 * x[:, 0, left:].mean() + 0.01 * x[2, :, :height].square().sum()

    fit(run, how)


@case
def crops_of_one_size(run: Run) -> None:
    def how(module: Images, x: Tensor, y: Tensor) -> Tensor:
        top, left = random.randint(0, 2), np.random.randint(0, 3)
        small = x[:, :, top : top + 6, left : left + module.size]
        shifted = torch.zeros_like(x)
        shifted[:, :, top : top + 6] = x[:, :, left : left + 6]
        shifted[:, :, left : left + 4] = shifted[:, :, top : top + 4] * 2
        return module.loss(nn.functional.pad(small, (1, 1, 1, 1)) + shifted, y)

    fit(run, how)


@case
def a_region_of_weights(run: Run) -> None:
    """Gradients go to the region alone."""

    def how(module: Images, x: Tensor, y: Tensor) -> Tensor:
        start = random.randint(0, 1)
        stop = start + random.randint(1, 2)
        weight = module.net[0].weight
        return module.loss(x, y) + weight[start:stop].mul(2).mean() + weight[:, start : start + 2].square().sum()

    fit(run, how)


if __name__ == "__main__":
    main()
