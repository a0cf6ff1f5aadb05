"""Every callback, logger and profiler with a JaxModule: it works, or is refused by name before the run; the page says which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.utils.data import DataLoader, TensorDataset

import torch_compat as pl
import xlatrain
from torch_compat import callbacks, loggers, profilers
from torch_compat.tuner import Tuner
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
REFUSED = {"BackboneFinetuning", "BaseFinetuning", "StochasticWeightAveraging", "ModelPruning"}
TUNING = {"BatchSizeFinder", "LearningRateFinder", "LearningRateMonitor"}
"""Have tests of their own."""
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


@pytest.mark.parametrize("name", sorted({*callbacks.__all__} - TUNING))
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


X = torch.linspace(-1, 1, 64).reshape(16, 4)
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Line(xlatrain.JaxModule):
    """A line from the origin, with a rate and a batch size to look for."""

    def __init__(self, lr: float = 0.01) -> None:
        self.weight = nnx.Param(jnp.zeros((4, 1)))
        self.lr, self.batch_size = lr, 2

    def training_step(self, batch: Any) -> jax.Array:
        return ((batch[0] @ self.weight[...] - batch[1]) ** 2).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, self.batch_size)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.inject_hyperparams(optax.sgd)(self.lr)


class TorchLine(pl.LightningModule):
    """The same in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 1))
        self.lr = 0.01

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return ((batch[0] @ self.weight - batch[1]) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_learning_rate_finder_finds_what_it_finds_for_the_same_module_of_torch(devices: int, tmp_path: Path) -> None:
    found = []
    for module in (Line(), TorchLine()):
        trainer = pl.Trainer(**{**QUIET, "default_root_dir": tmp_path, "devices": devices, "max_epochs": 20})
        loader = DataLoader(DATA, 8 // devices)
        result = Tuner(trainer).lr_find(module, loader, min_lr=1e-3, num_training=20)
        assert result is not None and module.lr == result.suggestion() != 0.01
        found.append(result.results)
        assert not np.asarray(jax.tree.leaves(nnx.state(module))[0] if isinstance(module, Line) else module.weight.detach()).any()
    np.testing.assert_allclose(found[0]["loss"], found[1]["loss"], rtol=1e-5)
    assert found[0]["lr"] == found[1]["lr"]


def test_a_rate_is_set_and_resumed(tmp_path: Path) -> None:
    def fitted(lr: float, epochs: int, rate: float | None = None, saved: Path | None = None) -> pl.Trainer:
        """Train with ``rate`` from the second epoch on."""

        class Sets(pl.Callback):
            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                if rate is not None and trainer.current_epoch == 1:
                    trainer.optimizers[0].param_groups[0]["lr"] = rate

        trainer = pl.Trainer(**{**QUIET, "default_root_dir": tmp_path, "max_epochs": epochs}, callbacks=[Sets()])
        trainer.fit(module := Line(lr), ckpt_path=saved)
        weights.append(np.asarray(module.weight[...]))
        return trainer

    weights: list[Any] = []
    fitted(0.01, 3, rate=0.1)
    fitted(0.01, 3)
    half = fitted(0.01, 2, rate=0.1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fitted(0.5, 3, saved=tmp_path / "half.ckpt")
    assert resumed.optimizers[0].param_groups[0]["lr"] == 0.1
    np.testing.assert_array_equal(weights[3], weights[0])
    assert np.abs(weights[1] - weights[0]).max() > 1e-2


def test_the_batch_size_finder_goes_up_to_the_dataset(tmp_path: Path) -> None:
    finder = callbacks.BatchSizeFinder(steps_per_trial=1)
    trainer = pl.Trainer(**{**QUIET, "default_root_dir": tmp_path}, callbacks=[finder])
    trainer.fit(module := Line())
    assert (finder.optimal_batch_size, module.batch_size, trainer.global_step) == (16, 16, 2)


def test_the_learning_rate_monitor_logs_an_injected_rate(tmp_path: Path) -> None:
    monitor = callbacks.LearningRateMonitor()
    trainer = pl.Trainer(**{**QUIET, "logger": loggers.CSVLogger(tmp_path)}, callbacks=[monitor])
    trainer.fit(Line(0.25))
    assert set(monitor.lrs["lr-OptaxOptimizer"]) == {0.25}


@pytest.mark.parametrize("callback", [callbacks.LearningRateFinder(update_attr=False), callbacks.LearningRateMonitor()])
def test_a_rate_that_is_not_injected_is_neither_read_nor_set(callback: Any, tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=f"{type(callback).__name__} needs a learning rate.*inject_hyperparams"):
        fit(tmp_path, callbacks=[callback], logger=loggers.CSVLogger(tmp_path))


@pytest.mark.parametrize("logger", [loggers.CSVLogger, loggers.TensorBoardLogger])
def test_a_logger_gets_what_is_logged(logger: Any, tmp_path: Path) -> None:
    made = logger(tmp_path)
    assert fit(tmp_path, logger=made) == 6
    assert any(Path(made.log_dir).iterdir())


@pytest.mark.parametrize("name", sorted(WORKING_PROFILERS))
def test_a_profiler_works(name: str, tmp_path: Path) -> None:
    assert f"`{name}`" in PAGE.read_text()
    assert fit(tmp_path, profiler=getattr(profilers, name)()) == 6
