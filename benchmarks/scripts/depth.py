"""Capture, trace, compile and first step of GPTs of growing depth, by the clock and in seconds of processor time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
from gpt import GPT, jax_lane, make_batches
from interleaved import quiet_trainer, write
from torch.utils.data import DataLoader

WIDTH, HEADS, LENGTH, BATCH = 64, 4, 32, 4


class FirstStep(pl.Callback):
    """Times from the first batch to the end of its step."""

    def __init__(self) -> None:
        self.timer = Timer()

    def on_train_batch_start(self, *_: object) -> None:
        self.timer = Timer()

    def on_train_batch_end(self, trainer: object, module: object, outputs: dict[str, object], *_: object) -> None:
        float(outputs["loss"])  # pyright: ignore[reportArgumentType]
        self.timer.stop()


class Timer:
    """Seconds by the clock and of processor time, from its making until :meth:`stop`."""

    def __init__(self) -> None:
        self._began = (time.perf_counter(), time.process_time())
        self.seconds: dict[str, float] = {}

    def stop(self) -> None:
        wall, cpu = self._began
        self.seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def trainer_lane(n_layers: int) -> dict[str, float]:
    first = FirstStep()
    loader = DataLoader(make_batches(1, BATCH, LENGTH), BATCH)
    quiet_trainer(max_epochs=1, gradient_clip_val=1.0, callbacks=[first]).fit(GPT(n_layers, WIDTH, HEADS, LENGTH), loader)
    return first.timer.seconds


def by_hand(n_layers: int) -> dict[str, float]:
    step = jax_lane(GPT(n_layers, WIDTH, HEADS, LENGTH))
    batch = list(make_batches(1, BATCH, LENGTH).tensors)
    timer = Timer()
    step(batch)
    timer.stop()
    return timer.seconds


LANES: dict[str, Callable[[int], dict[str, float]]] = {"trainer": trainer_lane, "jax": by_hand}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--lane", choices=sorted(LANES), default="trainer")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    LANES[args.lane](2)  # what is imported and compiled once in a process
    write(args.out, {str(n): LANES[args.lane](n) for n in args.layers})


if __name__ == "__main__":
    main()
