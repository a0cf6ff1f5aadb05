"""The shared part of this folder's scripts: cases, and callbacks and loggers that write down what happened.

Everything here is ordinary Lightning code; a script runs unchanged under stock Lightning and under ``python -m torch_compat``.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 16
"""Rows of one batch over all devices: stock takes them on one device, a mesh of W devices GLOBAL_BATCH / W on each."""

CASES: dict[str, Callable[[Run], None]] = {}


def case(function: Callable[[Run], None]) -> Callable[[Run], None]:
    """Register a case; its name is the function's."""
    CASES[function.__name__] = function
    return function


class Run:
    """A case in one process: how to place it, and everything that was written down."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.devices: int = args.devices
        self.nodes: int = args.nodes
        self.strategy: str = args.strategy
        self.accelerator: str = args.accelerator
        self.root = Path(args.out) / name
        self.root.mkdir(parents=True, exist_ok=True)
        self.initial_file = Path(args.initial) / f"{name}.pt"
        self.record: dict[str, Any] = {"losses": [], "lrs": [], "logged": [], "hooks": [], "fits": []}
        self.weights: dict[str, np.ndarray] = {}

    @property
    def batch_size(self) -> int:
        """The batch size that a user gives a DataLoader: rows per device."""
        return GLOBAL_BATCH // (self.devices * self.nodes)

    def loader(self, *tensors: Tensor, **options: Any) -> DataLoader:
        return DataLoader(TensorDataset(*tensors), batch_size=self.batch_size, **options)

    def initialise(self, model: nn.Module) -> None:
        """Start from the same weights everywhere: the first process to run a case saves them, the others load them."""
        if self.initial_file.exists():
            model.load_state_dict(torch.load(self.initial_file))
        else:
            self.initial_file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), self.initial_file)

    def trainer(self, *, callbacks: list[pl.Callback] | None = None, **options: Any) -> pl.Trainer:
        defaults: dict[str, Any] = {
            "accelerator": self.accelerator,
            "devices": self.devices,
            "num_nodes": self.nodes,
            "strategy": self.strategy,
            "default_root_dir": self.root,
            "logger": RecordingLogger(self),
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
        }
        if self.strategy == "xlatrain.lightning":  # stock's own Trainer, with compiled steps
            from xlatrain.lightning import MeshStrategy

            defaults.update(strategy=MeshStrategy(), accelerator="auto")
        return pl.Trainer(callbacks=[StepRecorder(self), *(callbacks or [])], **{**defaults, **options})

    def fit(self, model: pl.LightningModule, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Fit from the shared weights, then write down weights, metrics and counters."""
        self.initialise(model)
        trainer.fit(model, *args, **kwargs)
        self.finish(model, trainer)

    def finish(self, model: pl.LightningModule, trainer: pl.Trainer) -> None:
        self.record["fits"].append(
            {
                "callback_metrics": numbers(trainer.callback_metrics),
                "global_step": trainer.global_step,
                "current_epoch": trainer.current_epoch,
                "num_training_batches": trainer.num_training_batches,
                "num_val_batches": trainer.num_val_batches,
                "should_stop": trainer.should_stop,
                "state": [str(trainer.state.fn), str(trainer.state.status)],
                "training": model.training,
            }
        )
        self.weights = {name: value.detach().float().cpu().numpy() for name, value in model.state_dict().items()}

    def note(self, name: str, value: Any) -> None:
        """Write down anything else that is to be compared."""
        self.record.setdefault("notes", {})[name] = numbers(value)


def numbers(value: Any) -> Any:
    """``value`` as JSON: tensors as nested lists, paths as their last part."""
    if isinstance(value, Tensor):
        return value.detach().float().cpu().tolist()
    if isinstance(value, dict):
        return {str(key): numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [numbers(item) for item in value]
    if isinstance(value, Path):
        return value.name
    return value


class StepRecorder(pl.Callback):
    """Loss, learning rates and counters of every training batch."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        lrs = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.run.record["lrs"].append([trainer.current_epoch, batch_idx, trainer.global_step, numbers(lrs)])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.run.record["losses"].append(numbers(loss))


class RecordingLogger(Logger):
    """Writes down what it is given to log."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.run.record["logged"].append([step, {name: float(value) for name, value in sorted(metrics.items())}])

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.run.record.setdefault("hyperparams", []).append(numbers(dict(params)))


def describe(value: Any) -> Any:
    """An argument of a hook, as far as it must agree: kinds, shapes and plain values."""
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)} {value.dtype}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, pl.Trainer):
        return "trainer"
    if isinstance(value, pl.LightningModule):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    return "function" if callable(value) else "object"


def recording_hooks(base: type, hooks: list[str], owner: str) -> type:
    """A subclass of ``base`` that writes down every call of ``hooks``, with its arguments, then does what ``base`` does."""

    def override(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.run.record["hooks"].append([owner, name, describe(list(args)), describe(kwargs)])
            return getattr(super(cls, self), name)(*args, **kwargs)

        hook.__name__ = name
        return hook

    cls = type(f"Recording{base.__name__}", (base,), {name: override(name) for name in hooks})
    return cls


def reported_runs() -> list[dict[str, Any]]:
    """The run report's entries so far; none under stock."""
    report = Path(os.environ.get("XLATRAIN_REPORT", "no report"))
    return json.loads(report.read_text())["runs"] if report.exists() else []


def main() -> None:
    """Run cases; one folder per case with its record and weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1, help="per node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--out", required=True)
    parser.add_argument("--initial", required=True, help="folder of the shared initial weights")
    parser.add_argument("--cases", nargs="*", help="default: those of the script itself, not of what it imports")
    args = parser.parse_args()
    own = [name for name, function in CASES.items() if function.__module__ == "__main__"]
    for name in args.cases or own:
        function, run = CASES[name], Run(name, args)
        pl.seed_everything(1234, verbose=False)
        try:
            function(run)
        except (Exception, SystemExit) as error:
            # The comparison wants to know; the other cases go on.
            run.record["error"] = type(error).__name__
            run.record["traceback"] = traceback.format_exc()
        if rank_zero_only.rank == 0:
            (run.root / "runs.json").write_text(json.dumps(reported_runs()))
            (run.root / "record.json").write_text(json.dumps(run.record))
            np.savez(run.root / "weights.npz", **run.weights)
