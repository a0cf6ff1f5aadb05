"""Drives the callbacks of one package (`lightning.pytorch` or `torch_compat`) through scripted runs; prints what they did.

Run by `test_against_lightning.py`, once per package, in a process of its own. The trainer here decides nothing: it counts, calls
hooks in Lightning's order and records what callbacks ask of it. The result is JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
import tempfile
import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch

NAN = math.nan


class ScriptedTrainer:
    """A run of `epochs` × `batches` steps whose metrics are given."""

    def __init__(self, root: str, *, batches: int = 4, val_every: int | None = None, check_val_every_n_epoch: int = 1) -> None:
        self.events: list[Any] = []
        self.root = self.default_root_dir = root
        self.batches = self.num_training_batches = batches
        self.val_every = val_every or batches
        self.num_val_batches = [2]
        self.val_check_interval = 1.0 if val_every is None else val_every
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.val_check_seconds = self._val_check_time_interval = None
        self.enable_validation = True
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.loggers = [self]
        self.save_dir, self.name, self.version = None, "runs", 3
        self.current_epoch = self.global_step = self.global_rank = 0
        self.world_size = self.num_nodes = 1
        self.log_every_n_steps = 2
        self.should_stop = self.fast_dev_run = self.sanity_checking = False
        self.is_global_zero = True
        self.ckpt_path = None
        self.lr_scheduler_configs: list[Any] = []
        self.optimizers: list[Any] = []
        self.state = SimpleNamespace(fn="fit", stage="train")
        self.strategy = SimpleNamespace(
            broadcast=lambda value: value,
            barrier=lambda *_: None,
            reduce_boolean_decision=lambda decision, all=True: decision,
            remove_checkpoint=self.remove_checkpoint,
            root_device=torch.device("cpu"),
            commits_in_background=contextlib.nullcontext,
            pending_save=None,
        )
        self.is_last_batch = False
        # What Lightning's callbacks read of its loops.
        batch_progress = SimpleNamespace(is_last_batch=False)
        self.epoch_loop = SimpleNamespace(
            batch_progress=batch_progress, val_loop=SimpleNamespace(_has_run=False), _batches_that_stepped=0
        )
        self.fit_loop = SimpleNamespace(epoch_loop=self.epoch_loop)

    @property
    def _logger_connector(self) -> Any:
        return SimpleNamespace(should_update_logs=(self.global_step + 1) % self.log_every_n_steps == 0 or self.should_stop)

    def short(self, path: Any) -> str:
        return str(path).replace(self.root, "ROOT")

    def save_checkpoint(self, path: str, weights_only: bool = False) -> None:
        os.makedirs(path, exist_ok=True)
        self.events.append(["save", self.short(path), weights_only])

    def remove_checkpoint(self, path: str) -> None:
        os.remove(path) if os.path.islink(path) else os.rmdir(path)
        self.events.append(["remove", self.short(path)])

    def after_save_checkpoint(self, callback: Any) -> None:
        self.events.append(["logger told of", self.short(callback.last_model_path or callback.best_model_path)])

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.events.append(["log", step, metrics])

    def fit(self, callback: Any, module: Any, train: list[float], val: list[float], fail_at: int | None = None) -> None:
        """Steps log `train_loss`, validations `val_loss`, each the next of its list; step `fail_at` ends in an exception."""
        train_values, val_values = iter(train), iter(val)
        callback.setup(self, module, "fit")
        callback.on_train_start(self, module)
        for epoch in range(len(train) // self.batches):
            self.current_epoch = epoch
            callback.on_train_epoch_start(self, module)
            for batch_idx in range(self.batches):
                self.is_last_batch = self.epoch_loop.batch_progress.is_last_batch = batch_idx + 1 == self.batches
                callback.on_train_batch_start(self, module, None, batch_idx)
                self.global_step += 1
                self.callback_metrics["train_loss"] = torch.tensor(next(train_values))
                callback.on_train_batch_end(self, module, None, None, batch_idx)
                if self.global_step == fail_at:
                    callback.on_exception(self, module, RuntimeError("scripted"))
                    return
                if (batch_idx + 1) % self.val_every == 0 and (self.current_epoch + 1) % self.check_val_every_n_epoch == 0:
                    self.epoch_loop.val_loop._has_run = True
                    self.callback_metrics["val_loss"] = torch.tensor(next(val_values))
                    callback.on_validation_end(self, module)
                self.epoch_loop._batches_that_stepped = self.global_step
            callback.on_train_epoch_end(self, module)
            if self.should_stop:
                self.events.append(["stopped", self.current_epoch])
                break
        callback.on_train_end(self, module)


def plain(value: Any, trainer: ScriptedTrainer) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, dict):
        return {plain(key, trainer): plain(item, trainer) for key, item in value.items()}
    if isinstance(value, float):
        return repr(round(value, 6))
    return trainer.short(value) if isinstance(value, str) else value


TRAIN = [0.9, 0.8, 0.7, 0.6, 0.9, 0.4, 0.3, 0.2, 0.5, 0.6, 0.7, 0.8]
VAL = [0.5, 0.25, 0.75, 0.125, 0.3, 0.3]
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "default": {},
    "best": {"monitor": "val_loss"},
    "best two": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch:02d}-{val_loss:.2f}"},
    "weights only": {"save_weights_only": True, "save_last": True},
    "best three of one name": {"monitor": "val_loss", "save_top_k": 3, "filename": "model"},
    "overwrites": {"monitor": "val_loss", "save_top_k": 3, "filename": "model", "enable_version_counter": False},
    "max": {"monitor": "val_loss", "mode": "max", "save_last": True},
    "nan": {"monitor": "val_loss", "save_top_k": 2, "val": [NAN, 0.5, NAN, 0.1]},
    "nan, max": {"monitor": "val_loss", "save_top_k": 1, "mode": "max", "val": [0.5, NAN, 0.7]},
    "all": {"monitor": "val_loss", "save_top_k": -1},
    "all, no monitor": {"save_top_k": -1, "save_last": True},
    "last only": {"save_top_k": 0, "save_last": True},
    "link": {"save_last": "link"},
    "link, best": {"save_last": "link", "monitor": "val_loss"},
    "link, none": {"save_last": "link", "save_top_k": 0},
    "every 3 steps": {"every_n_train_steps": 3},
    "every 3 steps, all": {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"},
    "every 2 steps, val metric": {"every_n_train_steps": 2, "monitor": "val_loss", "save_top_k": 2, "save_last": True},
    "every 2 steps, after val": {
        "every_n_train_steps": 2,
        "monitor": "val_loss",
        "save_top_k": 2,
        "save_on_train_epoch_end": False,
        "save_last": True,
    },
    "every 2 steps, train metric": {"every_n_train_steps": 2, "monitor": "train_loss", "save_top_k": 2},
    "every 2 steps, never logged": {"every_n_train_steps": 2, "monitor": "nothing"},
    "any time": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "long time": {"train_time_interval": timedelta(hours=1), "save_last": True},
    "every 2 epochs": {"every_n_epochs": 2, "save_last": True},
    "every 0 epochs": {"every_n_epochs": 0},
    "after val": {"save_on_train_epoch_end": False, "monitor": "val_loss"},
    "val twice per epoch": {"monitor": "val_loss", "val_every": 2, "save_top_k": 2},
    "val twice per epoch, one name": {"val_every": 2, "filename": "{epoch}"},
    "val every second epoch": {"monitor": "val_loss", "check_val_every_n_epoch": 2},
    "names": {"filename": "e{epoch:02d}/s{step}_{val_loss:.3f}_{missing:d}", "auto_insert_metric_name": False},
    "exception": {"save_on_exception": True, "fail_at": 6, "save_last": True},
    "exception right after a save": {"save_on_exception": True, "fail_at": 6, "every_n_train_steps": 3},
    "no exception wanted": {"fail_at": 6},
    "directory": {"dirpath": "ROOT/some/where", "monitor": "val_loss"},
}
STOPPINGS: dict[str, dict[str, Any]] = {
    "patience": {"val": [0.5, 0.6, 0.4, 0.45, 0.5, 0.6, 0.1], "patience": 3},
    "min_delta": {"val": [0.5, 0.45, 0.41, 0.3, 0.25], "min_delta": 0.1, "patience": 2},
    "max": {"val": [0.5, 0.4, 0.3, 0.2], "mode": "max", "patience": 2},
    "nan": {"val": [0.5, NAN, 0.3]},
    "nan allowed": {"val": [0.5, NAN, 0.3], "check_finite": False},
    "threshold": {"val": [0.5, 0.2, 0.1], "stopping_threshold": 0.25},
    "divergence": {"val": [0.5, 3.0, 0.1], "divergence_threshold": 2.0},
    "after validation": {"val": [0.5, 0.6, 0.7, 0.8], "patience": 1, "check_on_train_epoch_end": False},
    "not strict": {"val": [0.5, 0.6], "monitor": "nothing", "strict": False},
}


def run_checkpoints(package: str) -> dict[str, Any]:
    kind = importlib.import_module(f"{package}.callbacks").ModelCheckpoint
    results = {}
    for label, options in CHECKPOINTS.items():
        options = dict(options)
        val, fail_at = options.pop("val", VAL), options.pop("fail_at", None)
        loop = {key: options.pop(key) for key in ("val_every", "check_val_every_n_epoch") if key in options}
        with tempfile.TemporaryDirectory() as root:
            root = os.path.realpath(root)
            trainer = ScriptedTrainer(root, **loop)
            if "dirpath" in options:
                options["dirpath"] = options["dirpath"].replace("ROOT", root)
            callback = kind(**options)
            trainer.fit(callback, SimpleNamespace(automatic_optimization=True), TRAIN, val, fail_at)
            tree = {
                trainer.short(os.path.join(folder, name)): os.path.islink(os.path.join(folder, name))
                for folder, names, _ in os.walk(root)
                for name in names
            }
            results[label] = {
                "events": trainer.events,
                "state": plain(callback.state_dict(), trainer),
                "state_key": callback.state_key,
                "tree (is link)": dict(sorted(tree.items())),
            }
    return results


def run_stoppings(package: str) -> dict[str, Any]:
    kind = importlib.import_module(f"{package}.callbacks").EarlyStopping
    results = {}
    for label, options in STOPPINGS.items():
        options = {"monitor": "val_loss", **options}
        val = options.pop("val")
        trainer, callback = ScriptedTrainer("nowhere", batches=1), kind(**options)
        trainer.fit(callback, None, [0.0] * len(val), val)
        state = callback.state_dict()
        results[label] = {
            "events": trainer.events,
            "state": plain({**state, "stopping_reason_message": bool(state["stopping_reason_message"])}, trainer),
            "state_key": callback.state_key,
            "reason": callback.stopping_reason.name,
        }
    return results


OPTIMIZERS = (
    "one", "two of a kind", "groups", "named group", "scheduled", "scheduled by epoch", "name and class", "two schedulers",
)  # fmt: skip


def optimizers(label: str) -> tuple[list[Any], list[Any]]:
    """Optimizers, and scheduler configurations as (optimizer, name, interval)."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    sgd, adam = torch.optim.SGD(weights[:1], lr=0.1, momentum=0.9), torch.optim.AdamW(weights[1:2], lr=0.01)
    groups = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:2], "lr": 0.5}], lr=0.1)
    named = torch.optim.SGD([{"params": weights[:1], "name": "head"}], lr=0.1)
    return {
        "one": ([sgd], []),
        "two of a kind": ([sgd, torch.optim.SGD(weights[2:3], lr=0.2), adam], []),
        "groups": ([groups], []),
        "named group": ([named], []),
        "scheduled": ([sgd, adam], [(sgd, None, "step")]),
        "scheduled by epoch": ([sgd, adam], [(adam, "mine", "epoch"), (sgd, None, "epoch")]),
        "name and class": ([sgd, groups], [(groups, "mine", "step")]),
        "two schedulers": ([sgd], [(sgd, None, "step"), (sgd, None, "epoch")]),
    }[label]


def run_lr_monitors(package: str) -> dict[str, Any]:
    kind = importlib.import_module(f"{package}.callbacks").LearningRateMonitor
    results = {}
    for label in OPTIMIZERS:
        for interval in (None, "step", "epoch"):
            trainer = ScriptedTrainer("nowhere")
            trainer.optimizers, configs = optimizers(label)
            trainer.lr_scheduler_configs = [
                SimpleNamespace(scheduler=SimpleNamespace(optimizer=optimizer), name=name, interval=every)
                for optimizer, name, every in configs
            ]
            callback = kind(interval, log_momentum=True, log_weight_decay=True)
            trainer.fit(callback, None, TRAIN, VAL)
            results[f"{label}, {interval}"] = {
                "events": trainer.events,
                "lrs": callback.lrs,
                "momenta": callback.last_momentum_values,
                "decays": callback.last_weight_decay_values,
                "monitored": {name: plain(value, trainer) for name, value in trainer.callback_metrics.items()},
            }
    return results


def main(package: str) -> None:
    warnings.simplefilter("ignore")
    results = {
        "checkpoints": run_checkpoints(package),
        "stoppings": run_stoppings(package),
        "lr_monitors": run_lr_monitors(package),
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
