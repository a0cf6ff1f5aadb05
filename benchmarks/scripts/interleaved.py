"""Times the Trainer's steps and, in turn with them, other ways to do the same step."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor

Lane = Callable[[Sequence[Tensor]], float]
"""A step on one batch of CPU tensors; gives its loss as a number, hence waits for it."""


class Interleaved(pl.Callback):
    """After each step of the Trainer one step of every lane on the same batch, each timed until its loss is known.

    Attributes:
        times: seconds of each step by name, the Trainer's as ``trainer``.
        losses: the same for losses: equal maths gives equal losses.
    """

    def __init__(self, batches: Sequence[Sequence[Tensor]]) -> None:
        self.batches = batches
        self.lanes: dict[str, Lane] = {}
        self.times: dict[str, list[float]] = {"trainer": []}
        self.losses: dict[str, list[float]] = {"trainer": []}
        self._began = 0.0

    def add(self, name: str, lane: Lane) -> None:
        """A lane, made after the Trainer: it settles how JAX starts, and lanes may start it."""
        self.lanes[name], self.times[name], self.losses[name] = lane, [], []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        _let_threads_sleep()
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note("trainer", self._began, outputs["loss"].item())
        for name, lane in self.lanes.items():
            _let_threads_sleep()
            began = time.perf_counter()
            self._note(name, began, lane(self.batches[batch_idx % len(self.batches)]))

    def _note(self, name: str, began: float, loss: float) -> None:
        self.times[name].append(time.perf_counter() - began)
        self.losses[name].append(loss)

    def result(self, warm_up: int = 3) -> dict[str, Any]:
        """Medians in ms without the first steps, and the largest relative deviation of each lane's losses from the Trainer's."""
        reference = np.array(self.losses["trainer"])
        return {
            "median_ms": {name: 1e3 * float(np.median(times[warm_up:])) for name, times in self.times.items()},
            "first_s": {name: times[0] for name, times in self.times.items()},
            "loss_deviation": {
                name: float(np.max(np.abs(np.array(losses) - reference) / np.abs(reference)))
                for name, losses in self.losses.items()
            },
            "steps": len(self.times["trainer"]) - warm_up,
        }


def _let_threads_sleep() -> None:
    """Wait until OpenMP's threads, which spin for some milliseconds after an op of torch, leave their core to the next lane."""
    time.sleep(0.02)


def parse_args(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """The options of every script, and those that ``parser`` has."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--lanes", nargs="*", default=[], choices=["jax", "torch"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result))


def quiet_trainer(**options: Any) -> pl.Trainer:
    """A Trainer on one CPU device, with nothing beside the steps."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
