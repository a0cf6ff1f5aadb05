"""Fits, validates, tests and predicts with the callbacks and loggers of one package; prints what they left behind as JSON.

Run by `test_trainer_runs.py` under `lightning.pytorch` and under `torch_compat`, on one device.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import sys
import tempfile
import warnings
from datetime import timedelta
from typing import Any

import torch


def make_module(pl: Any, **options: Any) -> Any:
    class Module(pl.LightningModule):
        def __init__(self, lr: float = 0.1, fail_at: int = -1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(4, 1)
            torch.nn.init.constant_(self.layer.weight, 0.5)
            torch.nn.init.zeros_(self.layer.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = (self(batch) - 1).pow(2).mean()
            self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == self.hparams["fail_at"]:
                raise ValueError("scripted")

        def on_train_epoch_end(self) -> None:
            self.log("late", float(self.current_epoch))

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val_loss", (self(batch) - 1).pow(2).mean(), prog_bar=True)

        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("test_loss", (self(batch) - 1).pow(2).mean())

        def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
            return self(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}

    return Module(**options)


def loader(batches: int = 4) -> Any:
    data = torch.linspace(-1, 1, batches * 8).reshape(batches * 2, 4)
    return torch.utils.data.DataLoader(data, batch_size=2)


def trainer(pl: Any, root: str, callbacks: list[Any], **options: Any) -> Any:
    options = {"max_epochs": 3, "logger": False, "enable_progress_bar": False, "enable_model_summary": False, **options}
    options.setdefault("enable_checkpointing", any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks))
    return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=root, callbacks=callbacks, log_every_n_steps=2, **options)


def tree(root: str) -> list[str]:
    """Files and directories, without what is inside checkpoints and event files' names."""
    found = []
    for folder, folders, names in os.walk(root):
        inside = [name for name in folders if not name.endswith(".ckpt")]
        found += [os.path.relpath(os.path.join(folder, name), root) for name in folders + names if not name.startswith("events.")]
        folders[:] = inside
    return sorted(found)


def rounded(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def run_csv(pl: Any, root: str) -> Any:
    """Columns, rows and steps of metrics.csv; which checkpoints there are; what the callbacks know afterwards."""
    callbacks = [
        pl.callbacks.ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.3f}"),
        pl.callbacks.LearningRateMonitor(log_momentum=True),
        pl.callbacks.EarlyStopping("train_loss_epoch", min_delta=1.0, patience=2),
        pl.callbacks.DeviceStatsMonitor(),
    ]
    run = trainer(pl, root, callbacks, logger=pl.loggers.CSVLogger(root), max_epochs=9)
    run.fit(make_module(pl), loader(), loader(2))
    run.test(run.lightning_module, loader(2), verbose=False)
    with open(os.path.join(root, "lightning_logs", "version_0", "metrics.csv"), newline="") as file:
        rows = [{key: _cell(key, value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    state = callbacks[0].state_dict()
    return {
        "rows": rows,
        "tree": tree(root),
        "best": os.path.relpath(callbacks[0].best_model_path, root),
        "score": rounded(state["best_model_score"]),
        "stopped": [callbacks[2].stopped_epoch, bool(callbacks[2].stopping_reason_message), run.current_epoch, run.global_step],
        "lrs": rounded({name: [round(lr, 4) for lr in lrs] for name, lrs in callbacks[1].lrs.items()}),
    }


def _cell(key: str, value: str) -> Any:
    return "some" if "percent" in key else round(float(value), 3)


def run_late_metric(pl: Any, root: str) -> Any:
    """`on_train_epoch_end` of the module logs what EarlyStopping and ModelCheckpoint monitor."""
    callbacks = [
        pl.callbacks.EarlyStopping("late", patience=1),
        pl.callbacks.ModelCheckpoint(os.path.join(root, "here"), monitor="late", mode="max", save_on_train_epoch_end=True),
    ]
    run = trainer(pl, root, callbacks)
    run.fit(make_module(pl), loader())
    return {"tree": tree(root), "epoch": run.current_epoch}


def run_steps(pl: Any, root: str) -> Any:
    callbacks = [
        pl.callbacks.ModelCheckpoint(os.path.join(root, "a"), every_n_train_steps=3, save_top_k=-1),
        pl.callbacks.ModelCheckpoint(
            os.path.join(root, "b"), monitor="val_loss", every_n_train_steps=2, save_top_k=2, save_on_train_epoch_end=False
        ),
        pl.callbacks.ModelCheckpoint(os.path.join(root, "c"), save_last="link"),
        pl.callbacks.ModelCheckpoint(os.path.join(root, "d"), monitor="val_loss", save_top_k=-1),
    ]
    run = trainer(pl, root, callbacks, val_check_interval=2, accumulate_grad_batches=1)
    run.fit(make_module(pl), loader(), loader(2))
    return {"tree": tree(root), "link": os.readlink(os.path.join(root, "c", "last.ckpt"))}


def run_names_used_again(pl: Any, root: str) -> Any:
    """A checkpoint's name is free when it was removed: versions of one name, and links over several runs."""
    one_name = {"filename": "model", "monitor": "train_loss", "every_n_train_steps": 1, "save_top_k": 2}
    callback = pl.callbacks.ModelCheckpoint(os.path.join(root, "a"), **one_name)
    trainer(pl, root, [callback]).fit(make_module(pl), loader())
    best = {os.path.basename(path): rounded(score) for path, score in callback.best_k_models.items()}
    for epochs in (1, 2, 3):
        linked = pl.callbacks.ModelCheckpoint(os.path.join(root, "b"), save_last="link")
        run = trainer(pl, root, [linked], max_epochs=epochs)
        run.fit(make_module(pl), loader(), ckpt_path="last" if epochs > 1 else None)
    return {"tree": tree(root), "best": best, "link": os.readlink(os.path.join(root, "b", "last.ckpt")), "steps": run.global_step}


def run_accumulation(pl: Any, root: str) -> Any:
    steps = []

    class Count(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            steps.append(trainer.global_step)

    run = trainer(pl, root, [pl.callbacks.GradientAccumulationScheduler({1: 2, 2: 3}), Count()])
    run.fit(make_module(pl), loader())
    return steps


def run_exceptions(pl: Any, root: str) -> Any:
    callbacks = [
        pl.callbacks.OnExceptionCheckpoint(root, "failed"),
        pl.callbacks.ModelCheckpoint(os.path.join(root, "a"), save_on_exception=True, save_last=True),
    ]
    run, error = trainer(pl, root, callbacks), None
    try:
        run.fit(make_module(pl, fail_at=6), loader())
    except ValueError as exception:
        error = str(exception)
    after_failure = tree(root)
    resumed = trainer(pl, root, [pl.callbacks.OnExceptionCheckpoint(root, "failed")])
    resumed.fit(make_module(pl), loader(), ckpt_path=os.path.join(root, "failed.ckpt"))
    return {"error": error, "tree": after_failure, "after success": tree(root), "steps": resumed.global_step}


def run_resume(pl: Any, root: str) -> Any:
    """Callbacks' state goes through a checkpoint."""

    def callbacks() -> list[Any]:
        return [
            pl.callbacks.ModelCheckpoint(os.path.join(root, "a"), monitor="val_loss", save_top_k=2, save_last=True),
            pl.callbacks.EarlyStopping("val_loss", patience=9),
            pl.callbacks.Timer(),
        ]

    first, second = callbacks(), callbacks()
    trainer(pl, root, first, max_epochs=2).fit(make_module(pl), loader(), loader(2))
    last = os.path.join(root, "a", "last.ckpt")
    run = trainer(pl, root, second, max_epochs=4)
    run.fit(make_module(pl), loader(), loader(2), ckpt_path=last)
    return {
        "tree": tree(root),
        "best": sorted(os.path.basename(path) for path in second[0].best_k_models),
        "waits": [first[1].wait_count, second[1].wait_count],
        "score": rounded(second[1].best_score),
        "time kept": second[2].time_elapsed() > second[2].end_time() - second[2].start_time(),
        "steps": run.global_step,
    }


def run_predictions(pl: Any, root: str) -> Any:
    seen: list[Any] = []

    class Writer(pl.callbacks.BasePredictionWriter):
        def write_on_batch_end(
            self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, batch: Any, *where: int
        ) -> None:
            seen.append(["batch", list(prediction.shape), list(indices), *where])

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, indices: Any) -> None:
            seen.append(["epoch", [[list(batch.shape) for batch in each] for each in predictions], indices])

    for interval in ("batch", "epoch", "batch_and_epoch"):
        seen.append(interval)
        run = trainer(pl, root, [Writer(interval)])
        run.predict(make_module(pl), [loader(1), loader(2)], return_predictions=False)
    return seen


def run_loggers(pl: Any, root: str) -> Any:
    """Several loggers, one directory; none; and what `fast_dev_run` leaves."""
    loggers = [pl.loggers.CSVLogger(root), pl.loggers.TensorBoardLogger(root, log_graph=False)]
    run = trainer(pl, root, [], logger=loggers, enable_checkpointing=True, max_epochs=1)
    run.fit(make_module(pl), loader(), loader(2))
    versions = [str(logger.version) for logger in loggers]
    quick = trainer(pl, root, [pl.callbacks.ModelCheckpoint(save_last=True)], logger=loggers, fast_dev_run=True)
    quick.fit(make_module(pl), loader(), loader(2))
    plain = trainer(pl, root, [], enable_checkpointing=True, max_epochs=1)
    plain.fit(make_module(pl), loader())
    return {"tree": tree(root), "versions": versions, "log_dir": os.path.relpath(run.log_dir, root)}


def run_missing_monitors(pl: Any, root: str) -> Any:
    """The kinds of error; nothing else of the run is lost."""
    errors = []
    for callback in (pl.callbacks.ModelCheckpoint(root, monitor="nothing"), pl.callbacks.EarlyStopping("nothing")):
        run = trainer(pl, root, [callback])
        try:
            run.fit(make_module(pl), loader(), loader(2))
        except Exception as error:
            errors.append([type(error).__name__, all(name in str(error) for name in ("nothing", "train_loss", "val_loss"))])
    return errors


CHECKPOINT_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "name": {"filename": "{epoch:02d}-{val_loss:.2f}-{nothing}", "monitor": "val_loss", "save_top_k": 2},
    "slash": {"filename": "e{epoch}/{val/twice:.1f}", "monitor": "val/twice", "auto_insert_metric_name": False},
    "slash in a name that is inserted": {"filename": "{step}-{val/twice:.1f}"},
    "worst": {"filename": "{val_loss:.3f}", "monitor": "val_loss", "mode": "max", "save_last": True},
    "all": {"filename": "{epoch}", "save_top_k": -1, "save_last": "link"},
    "none": {"save_top_k": 0, "save_last": True},
    "none, link": {"save_top_k": 0, "save_last": "link"},
    "one name": {"filename": "same", "save_top_k": -1},
    "one name, overwritten": {"filename": "same", "save_top_k": -1, "enable_version_counter": False},
    "one name, from 7": {"filename": "same", "save_top_k": -1, "STARTING_VERSION": 7},
    "steps": {"every_n_train_steps": 2, "filename": "{step}-{train_loss_step:.2f}", "save_top_k": -1},
    "steps, metric": {"every_n_train_steps": 2, "monitor": "train_loss", "save_top_k": 1, "save_last": True},
    "steps, link": {"every_n_train_steps": 3, "save_last": "link"},
    "epochs": {"every_n_epochs": 2},
    "no epochs": {"every_n_epochs": 0, "save_last": True},
    "time": {"train_time_interval": timedelta(0), "save_top_k": -1, "filename": "{step}"},
    "long time": {"train_time_interval": timedelta(days=1), "save_last": True},
    "after training": {"save_on_train_epoch_end": True, "monitor": "train_loss_epoch"},
    "after validation": {"save_on_train_epoch_end": False, "monitor": "val_loss"},
    "weights": {"save_weights_only": True, "filename": "weights"},
    "characters": {"CHECKPOINT_JOIN_CHAR": "_", "CHECKPOINT_EQUALS_CHAR": ":", "save_top_k": -1},
    "last by name": {"CHECKPOINT_NAME_LAST": "{epoch}-{val_loss:.1f}-final", "save_last": True, "filename": "x"},
    "extension": {"FILE_EXTENSION": ".pt.ckpt", "save_last": True},
    "exception": {"save_on_exception": True, "every_n_train_steps": 100, "filename": "at-{step}"},
}


def run_checkpoint_options(pl: Any, root: str) -> Any:
    """Every option and class attribute of ModelCheckpoint, each in a directory of its own, in one run that ends in an error."""

    class Module(type(make_module(pl))):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("val/twice", 2 * (self(batch) - 1).pow(2).mean())

    callbacks = []
    for label, options in CHECKPOINT_OPTIONS.items():
        attributes = {name: value for name, value in options.items() if name.isupper()}
        kind = type(f"ModelCheckpoint of {label}", (pl.callbacks.ModelCheckpoint,), attributes)  # the name: of its state
        options = {name: value for name, value in options.items() if not name.isupper()}
        callbacks.append(kind(os.path.join(root, label), **options))
    run = trainer(pl, root, callbacks)
    with contextlib.suppress(ValueError):
        run.fit(Module(fail_at=7), loader(3), loader(2))
    found = {"status": str(run.state.status), "interrupted": run.interrupted}
    for label, callback in zip(CHECKPOINT_OPTIONS, callbacks, strict=True):
        state = {name: _relative(value, root) for name, value in callback.state_dict().items()}
        folder = os.path.join(root, label)
        links = {
            name: os.readlink(os.path.join(folder, name)) for name in tree(folder) if os.path.islink(os.path.join(folder, name))
        }
        found[label] = {"tree": tree(folder), "links": links, "state": state, "key": callback.state_key}
    # Two packages, two formats: what they have in common is what a module's own load sees.
    seen: list[str] = []

    class Reader(type(make_module(pl))):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen.extend(sorted(checkpoint))

    Reader.load_from_checkpoint(os.path.join(root, "weights", "weights.ckpt"), weights_only=False)
    found["keys of weights"] = seen
    return found


def _relative(value: Any, root: str) -> Any:
    if isinstance(value, dict):
        return {_relative(key, root): _relative(item, root) for key, item in value.items()}
    return value.replace(root, "ROOT") if isinstance(value, str) else rounded(value)


def run_default_callbacks(pl: Any, root: str) -> Any:
    """Which callbacks a Trainer has, in which order; and whom the module's `configure_callbacks` replaces."""

    class Own(pl.callbacks.ModelCheckpoint):
        pass

    def names(run: Any) -> list[str]:
        return [type(callback).__name__ for callback in run.callbacks]

    plain = {"enable_checkpointing": True, "enable_progress_bar": True, "enable_model_summary": True}
    summary = pl.callbacks.ModelSummary()
    module = make_module(pl)
    module.configure_callbacks = lambda: [Own(root), pl.callbacks.EarlyStopping("train_loss", patience=9)]
    replaced = trainer(pl, root, [pl.callbacks.Timer()], **{**plain, "enable_progress_bar": False}, max_epochs=1)
    replaced.fit(module, loader())
    return {
        "default": names(trainer(pl, root, [], **plain)),
        "time": names(trainer(pl, root, [pl.callbacks.Callback(), summary], **plain, max_time="00:01:00:00")),
        "tuner": names(trainer(pl, root, [pl.callbacks.Timer(), pl.callbacks.LearningRateFinder()], max_time="00:01:00:00")),
        "replaced": names(replaced),
    }


RUNS = (
    run_csv, run_late_metric, run_steps, run_names_used_again, run_accumulation, run_exceptions, run_resume, run_predictions,
    run_loggers, run_missing_monitors, run_default_callbacks, run_checkpoint_options,
)  # fmt: skip


def main(package: str) -> None:
    warnings.simplefilter("ignore")
    pl = importlib.import_module(package)
    for name in ("callbacks", "loggers"):
        importlib.import_module(f"{package}.{name}")
    results = {}
    for run in RUNS:
        if len(sys.argv) > 2 and run.__name__ != sys.argv[2]:
            continue
        with tempfile.TemporaryDirectory() as root:
            results[run.__name__] = run(pl, os.path.realpath(root))
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
