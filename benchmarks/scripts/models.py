"""Steps of one model of the zoo: processor time of training and of ``predict``, of the first of each, and peak memory."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"

import argparse
import resource
import statistics
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from interleaved import parse_args, quiet_trainer, write
from torch import Tensor
from zoo import ZOO


class Batches(torch.utils.data.Dataset):
    """The same batch again and again."""

    def __init__(self, batch: Sequence[Tensor], count: int) -> None:
        self.batch, self.count = tuple(batch), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.batch


def seconds() -> float:
    """Processor time of this process and of the compilers that it has started."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)


class Clock(pl.Callback):
    """Processor time between the ends of batches, each of which is waited for."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {"train": [], "predict": []}
        self.losses: list[float] = []
        self._last = 0.0

    def begin(self) -> None:
        self._last = seconds()

    def _end(self, what: str) -> None:
        now = seconds()
        self.times[what].append(now - self._last)
        self._last = now

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self._end("train")

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs.sum().item()
        self._end("predict")


def spread(times: Sequence[float]) -> dict[str, float]:
    """The first, and of the others, of which the second is left out, the median and the quartiles; ms."""
    low, median, high = statistics.quantiles([1e3 * time for time in times[2:]], n=4)
    return {"first": 1e3 * times[0], "median": median, "low": low, "high": high}


def predict_again(trainer: Any, module: Any, batches: Batches) -> float:
    """Seconds of a whole call of ``predict``, whose results are kept."""
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    began = seconds()
    trainer.predict(module, loader)
    return seconds() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(ZOO), required=True)
    parser.add_argument("--inductor", action="store_true", help="the net's forward is compiled by torch")
    args = parse_args(parser)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module, batch = ZOO[args.model]()
    if args.inductor:
        for child in module.children():
            child.compile()
    clock = Clock()
    loader = torch.utils.data.DataLoader(Batches(batch, args.steps), batch_size=None)
    clock.begin()
    trainer = quiet_trainer(max_epochs=1, callbacks=[clock])
    trainer.fit(module, loader)
    clock.begin()
    trainer.predict(module, loader, return_predictions=False)
    trainer.callbacks.remove(clock)
    again = [predict_again(trainer, module, Batches(batch, 5)) for _ in range(6)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {name: spread(times) for name, times in clock.times.items()}
    write(args.out, {**found, "predict_again_ms": 1e3 * min(again), "peak_mib": peak, "losses": clock.losses})


if __name__ == "__main__":
    main()
