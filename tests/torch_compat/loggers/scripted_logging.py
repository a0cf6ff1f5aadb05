"""Logs with the loggers of one package (`lightning.pytorch` or `torch_compat`); prints the files as JSON, and the public API.

Run by `test_against_lightning.py`, once per package, in a process of its own.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import tempfile
import warnings
from argparse import Namespace
from enum import Enum
from typing import Any

import torch

CALLBACKS = (
    "BasePredictionWriter", "Callback", "Checkpoint", "DeviceStatsMonitor", "EarlyStopping", "GradientAccumulationScheduler",
    "LambdaCallback", "LearningRateMonitor", "ModelCheckpoint", "ModelSummary", "OnExceptionCheckpoint", "ProgressBar",
    "RichModelSummary", "RichProgressBar", "TQDMProgressBar", "Timer",
)  # fmt: skip
LOGGERS = ("CSVLogger", "Logger", "TensorBoardLogger", "WandbLogger")


def log_csv(loggers: Any, root: str) -> None:
    first = loggers.CSVLogger(root, flush_logs_every_n_steps=3)
    first.log_hyperparams({"lr": 0.1, "layers": [1, 2], "nested": {"a": 1}})
    first.log_hyperparams(Namespace(late=True))
    for step in range(4):
        first.log_metrics({"loss": torch.tensor(1.0 / (step + 1)), "epoch": 0}, step)
    first.log_metrics({"val_loss": 0.5, "acc": 1}, 4)
    first.log_metrics({"loss": 3.0})
    first.finalize("success")
    second = loggers.CSVLogger(root)
    second.log_metrics({"a": 1.0}, 0)
    second.save()
    named = loggers.CSVLogger(root, name=None, version="mine", prefix="run")
    named.log_metrics({"a": 1.0}, 7)
    named.finalize("failed")
    again = loggers.CSVLogger(root, name="", version="mine")
    again.log_metrics({"b": 1.0}, 8)
    again.finalize("success")
    os.makedirs(os.path.join(root, "lightning_logs", "version_41"))
    loggers.CSVLogger(root).log_metrics({"never": "written"}, 0)


def log_tensorboard(loggers: Any, root: str) -> None:
    first = loggers.TensorBoardLogger(root, log_graph=False)
    first.log_hyperparams({"lr": 0.1, "nested": {"depth": 2}, "list": [{"a": 1}, {"b": 2}], "layer": torch.nn.Linear})
    first.log_metrics({"loss": torch.tensor(0.5), "parts": {"a": 1.0, "b": 2.0}}, 3)
    first.log_metrics({"loss": 0.25}, 4)
    first.finalize("success")
    second = loggers.TensorBoardLogger(root, version="mine", sub_dir="sub", prefix="run", default_hp_metric=False)
    second.log_hyperparams(Namespace(lr=0.1))
    second.log_hyperparams({"width": 2}, {"score": 1.5}, step=2)
    second.log_metrics({"loss": 1}, 0)
    second.finalize("failed")
    third = loggers.TensorBoardLogger(root, name="named")
    third.log_hyperparams({"lr": 1}, metrics=0.75)
    third.save()


def files(root: str) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for folder, _, names in os.walk(root):
        short = os.path.relpath(folder, root)
        tree[short] = sorted(name for name in names if not name.startswith("events."))
        for name in tree[short]:
            with open(os.path.join(folder, name), newline="") as file:
                tree[f"{short}/{name}"] = file.read()
        if any(name.startswith("events.") for name in names):
            tree[f"{short}/scalars"] = scalars(folder)
    return dict(sorted(tree.items()))


def scalars(folder: str) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder).Reload()
    found: dict[str, Any] = {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    found["hparams"] = [hparams(events.summary_metadata[tag]) for tag in sorted(events.summary_metadata) if "_hparams_" in tag]
    return found


def hparams(metadata: Any) -> dict[str, Any]:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = HParamsPluginData.FromString(metadata.plugin_data.content)
    return {
        "columns": sorted(info.name for info in data.experiment.hparam_infos),
        "metrics": sorted(info.name.tag for info in data.experiment.metric_infos),
        "values": {name: str(value) for name, value in sorted(data.session_start_info.hparams.items())},
        "status": data.session_end_info.status,
    }


def tell_paths(loggers: Any) -> dict[str, Any]:
    paths = {}
    for kind in (loggers.CSVLogger, loggers.TensorBoardLogger):
        for options in ({}, {"version": "v", "name": "n"}, {"version": 5, "name": None}):
            logger = kind("dir", **options)
            names = ("name", "version", "save_dir", "root_dir", "log_dir", "group_separator")
            paths[f"{kind.__name__} {options}"] = {name: getattr(logger, name) for name in names}
    return paths


def api(package: str) -> dict[str, dict[str, Any]]:
    modules = {
        importlib.import_module(f"{package}.callbacks"): CALLBACKS,
        importlib.import_module(f"{package}.loggers"): LOGGERS,
        importlib.import_module(f"{package}.loggers.logger"): ("DummyLogger",),
        importlib.import_module(f"{package}.callbacks.progress.rich_progress"): ("RichProgressBarTheme",),
    }
    return {name: members(getattr(module, name)) for module, names in modules.items() for name in names if hasattr(module, name)}


def members(kind: type) -> dict[str, Any]:
    own = {}
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        if name == "__init__" or (not name.startswith("_") and (callable(value) or isinstance(value, staticmethod))):
            own[name] = parameters(getattr(kind, name))
        elif not name.startswith("_"):
            own[name] = "property" if isinstance(value, property) else repr(value) if isinstance(value, (str, int)) else "other"
    return own


def parameters(function: Any) -> Any:
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:
        return "no signature"
    return [[p.name, p.kind.name, "" if p.default is p.empty else _default(p.default)] for p in found]


def _default(value: Any) -> str:
    return repr(value.value if isinstance(value, Enum) else value)


def main(package: str) -> None:
    warnings.simplefilter("ignore")
    loggers = importlib.import_module(f"{package}.loggers")
    results: dict[str, Any] = {"api": api(package), "paths": tell_paths(loggers)}
    for write in (log_csv, log_tensorboard):
        with tempfile.TemporaryDirectory() as root:
            write(loggers, root)
            results[write.__name__] = files(root)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
