"""Host time per step of finding the variant that is right for today's host values: guards, attributes, counters, draws."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from interleaved import parse_args, quiet_trainer, write
from tiny import Tiny
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torch_compat.step.program_cache import ProgramCache


class Reading(Tiny):
    """Reads forty attributes, a dict of options and a callback in every step, and branches on a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Dropout(0.0) for _ in range(20))
        for block in self.blocks:
            block.scale = 1.0  # pyright: ignore[reportArgumentType]
        self.options = {"alpha": 1.0, "deep": {"beta": [1.0, 2.0]}}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for block in self.blocks:
            loss = block(loss) * block.scale
        if batch_idx % 100_000 == 50_000:
            loss = loss * 2
        return loss * self.options["deep"]["beta"][0]


class Changing(Reading):
    """The same; a hook changes a number before every step, and the step draws one."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rate *= 0.999

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.rate * (1 + 0.01 * random.random())


def seconds_of(model: pl.LightningModule, steps: int) -> list[float]:
    """Seconds that each step spent on finding its variant."""
    times: list[float] = []
    lookup = ProgramCache.program

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = lookup(*args, **kwargs)
        times.append(time.perf_counter() - began)
        return found

    ProgramCache.program = timed  # pyright: ignore[reportAttributeAccessIssue]
    try:
        data = TensorDataset(torch.randn(8 * steps, 32), torch.randn(8 * steps, 2))
        quiet_trainer(max_epochs=1).fit(model, DataLoader(data, batch_size=8))
    finally:
        ProgramCache.program = lookup
    return times


def main() -> None:
    args = parse_args()
    models = {"a plain step": Tiny(), "forty attributes read": Reading(), "a number changed, one drawn": Changing()}
    write(args.out, {name: 1e6 * statistics.median(seconds_of(model, args.steps)) for name, model in models.items()})


if __name__ == "__main__":
    main()
