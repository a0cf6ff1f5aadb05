"""Every callback, logger and profiler with a JaxModule: it works, or is refused by name before the run; the page says which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import torch_compat as pl
import xlatrain
from torch_compat import callbacks, loggers, profilers
from torch_compat.utilities.exceptions import MisconfigurationException

PAGE = Path(__file__).parents[3] / "docs" / "jax_modules.md"
WITH_ARGUMENTS: dict[str, Callable[[Path], Any]] = {
    "EarlyStopping": lambda folder: callbacks.EarlyStopping("val"),
    "GradientAccumulationScheduler": lambda folder: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    "OnExceptionCheckpoint": lambda folder: callbacks.OnExceptionCheckpoint(folder),
    "SpikeDetection": lambda folder: callbacks.SpikeDetection(warmup=100),
    "StochasticWeightAveraging": lambda folder: callbacks.StochasticWeightAveraging(0.1),
    "ThroughputMonitor": lambda folder: callbacks.ThroughputMonitor(lambda batch: len(batch["x"])),
    "ModelPruning": lambda folder: callbacks.ModelPruning("l1_unstructured"),
}
REFUSED = {
    *("BackboneFinetuning", "BaseFinetuning", "BatchSizeFinder", "LearningRateFinder", "LearningRateMonitor"),
    *("StochasticWeightAveraging", "ModelPruning"),
}
WORKING_PROFILERS = {"SimpleProfiler", "AdvancedProfiler", "PassThroughProfiler"}


class Batches:
    """Batches of numpy arrays, the same in each epoch."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        draw = np.random.RandomState(0)
        return iter([{name: draw.randn(8, n).astype(np.float32) for name, n in (("x", 4), ("y", 1))} for _ in range(3)])


class Small(xlatrain.JaxModule):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.outer = nnx.Linear(4, 1, rngs=rngs)

    def loss(self, batch: Any) -> jax.Array:
        return ((self.outer(self.norm(self.inner(batch["x"]))) - batch["y"]) ** 2).mean()

    def training_step(self, batch: Any) -> jax.Array:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


QUIET: dict[str, Any] = {
    **dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False),
    "max_epochs": 2,
    "accelerator": "cpu",
    "devices": 1,
    "log_every_n_steps": 1,
}


def fit(folder: Path, **options: Any) -> int:
    trainer = pl.Trainer(**{**QUIET, "default_root_dir": folder, **options})
    trainer.fit(Small(), Batches(), Batches())
    return trainer.global_step


@pytest.mark.parametrize("name", callbacks.__all__)
def test_a_callback_works_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    assert f"`{name}`" in PAGE.read_text()
    options: dict[str, Any] = {"logger": loggers.CSVLogger(tmp_path)} if name.endswith("Monitor") else {}
    if name.endswith("Bar"):
        options["enable_progress_bar"] = True
    if "Checkpoint" in name:
        options["enable_checkpointing"] = True
    if name == "SilentDataCorruptionCheck":
        options["devices"] = 2  # one has no replica
    make = WITH_ARGUMENTS.get(name, lambda folder: getattr(callbacks, name)())
    if name in REFUSED:
        with pytest.raises(MisconfigurationException, match=name):
            run(tmp_path, make(tmp_path), options)
    else:
        assert run(tmp_path, make(tmp_path), options) in (5, 6)


def run(folder: Path, callback: Any, options: dict[str, Any]) -> int:
    return fit(folder, callbacks=[callback], **options)


@pytest.mark.parametrize("logger", [loggers.CSVLogger, loggers.TensorBoardLogger])
def test_a_logger_gets_what_is_logged(logger: Any, tmp_path: Path) -> None:
    made = logger(tmp_path)
    assert fit(tmp_path, logger=made) == 6
    assert any(Path(made.log_dir).iterdir())


@pytest.mark.parametrize("name", sorted(WORKING_PROFILERS))
def test_a_profiler_works(name: str, tmp_path: Path) -> None:
    assert f"`{name}`" in PAGE.read_text()
    assert fit(tmp_path, profiler=getattr(profilers, name)()) == 6
