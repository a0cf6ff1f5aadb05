"""Loggers and profilers, each used alone."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from answering import ask, ask_each, attempt
from lightning.fabric import loggers as fabric_loggers
from lightning.fabric.utilities import logger as logger_tools
from lightning.pytorch import loggers, profilers
from torch import nn

# -- loggers -------------------------------------------------------------------------------------------------------------

ask_each(
    flattened=lambda: logger_tools._flatten_dict({"a": {"b": 1, 2: {"c": 3}}, "list": [{"x": 1}], 4: 5}),
    flattened_with=lambda: logger_tools._flatten_dict({"a": {"b": 1}}, delimiter="."),
    sanitized=lambda: logger_tools._sanitize_params(
        {"a": 1, "b": [1], "c": torch.tensor(0.5), "d": nn.Linear, "e": None, "f": True}
    ),
    sanitized_callables=lambda: logger_tools._sanitize_callable_params(
        {"f": lambda: 3, "g": lambda: lambda: 1, "h": dict, "i": print}
    ),
    converted_params=lambda: [logger_tools._convert_params(value) for value in (None, {"a": 1}, Namespace(b=2))],
    prefixed_metrics=lambda: logger_tools._add_prefix({"a": 1, "b": 2}, "run", "-"),
    json_params=lambda: logger_tools._convert_json_serializable({"a": {1}, "b": [1], "c": object}),
)


class Own(loggers.Logger):
    name = "own"
    version = 3

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def files(root: str = ".") -> dict[str, Any]:
    """Path → content of text files, size's sign of others."""
    return {
        str(path.relative_to(root)): path.read_text() if path.suffix in (".csv", ".yaml") else "binary"
        for path in sorted(Path(root).rglob("*"))
        if path.is_file() and not path.name.startswith("events")
    }


@ask
def csv_versions() -> Any:
    found = []
    for _ in range(3):
        logger = loggers.CSVLogger(".", name="n")
        logger.log_metrics({"a": 1.0}, 0)
        logger.save()
        found.append([logger.version, logger.log_dir, logger.root_dir, logger.save_dir, logger.name])
    os.mkdir("n/version_x")
    return [found, loggers.CSVLogger(".", "n").version, loggers.CSVLogger(".", "n", version="mine").log_dir, files()]


@ask
def csv_of_fabric() -> Any:
    logger = fabric_loggers.CSVLogger(root_dir=".", name="f", prefix="p", flush_logs_every_n_steps=1)
    logger.log_metrics({"a": torch.tensor(1.0)}, 0)
    logger.log_metrics({"b": 2}, None)
    logger.finalize("success")
    return [
        logger.root_dir,
        logger.log_dir,
        logger.name,
        logger.version,
        files(),
        attempt(lambda: logger.log_hyperparams({"a": 1})),
        files(),
    ]


@ask
def csv_of_fabric_hyperparameters() -> Any:
    return [
        attempt(lambda: fabric_loggers.CSVLogger(".").log_hyperparams({"a": 1})),
        hasattr(fabric_loggers.CSVLogger("."), "log_hyperparams"),
    ]


@ask
def tensorboard_of_fabric() -> Any:
    logger = fabric_loggers.TensorBoardLogger(root_dir="tb", name="n", sub_dir="s")
    logger.log_metrics({"a": 1.0, "d": {"x": 1.0}}, 0)
    logger.log_hyperparams({"lr": 0.1, "deep": {"a": [1]}}, {"score": 1.0})
    logger.finalize("success")
    return [
        logger.root_dir,
        logger.log_dir,
        logger.name,
        logger.version,
        logger.sub_dir,
        files(),
        type(logger.experiment).__name__,
    ]


ask_each(
    csv_negative=lambda: loggers.CSVLogger(".").log_metrics({"a": "text"}, 0),
    csv_vector=lambda: loggers.CSVLogger(".").log_metrics({"a": torch.ones(2)}, 0),
    tensorboard_vector=lambda: loggers.TensorBoardLogger(os.getcwd()).log_metrics({"a": torch.ones(2)}, 0),
    tensorboard_text=lambda: loggers.TensorBoardLogger(os.getcwd()).log_metrics({"a": "text"}, 0),
    tensorboard_hyper_vector=lambda: loggers.TensorBoardLogger(os.getcwd()).log_hyperparams({"a": 1}, {"m": 1}),
    own_logger=lambda: [
        Own().save(),
        Own().finalize("x"),
        Own().save_dir,
        Own().log_graph(None),
        Own().group_separator,
        Own().log_dir if hasattr(Own(), "log_dir") else "no log_dir",
    ],
    own_logger_checkpoint=lambda: Own().after_save_checkpoint(None),
    abstract_logger=lambda: loggers.Logger(),
    wandb_missing=lambda: loggers.WandbLogger(offline=True),
    comet_missing=lambda: loggers.CometLogger(),
    mlflow_missing=lambda: loggers.MLFlowLogger(),
    neptune=lambda: loggers.NeptuneLogger(),
)


@ask
def tensorboard_files() -> Any:
    first = loggers.TensorBoardLogger("tb", name="n")
    first.log_hyperparams({"lr": 0.1})
    first.log_metrics({"a": 1.0}, 0)
    first.save()
    second = loggers.TensorBoardLogger("tb", name="n")
    nameless = loggers.TensorBoardLogger("tb", name=None, version="v")
    places = [[one.version, one.log_dir, one.root_dir, one.save_dir, one.name, one.sub_dir] for one in (first, second, nameless)]
    first.finalize("success")
    return [*places, files(), first.hparams]


# -- profilers -----------------------------------------------------------------------------------------------------------


@ask
def simple_profiler() -> Any:
    profiler = profilers.SimpleProfiler(dirpath=".", filename="out")
    with profiler.profile("step"):
        pass
    profiler.start("open")
    twice = attempt(lambda: profiler.start("open"))
    profiler.stop("open")
    missing = attempt(lambda: profiler.stop("never"))
    profiler.recorded_durations.update(step=[1.0], open=[2.0])  # the table is in order of them
    text = profiler.summary().splitlines()
    profiler.describe()
    return [
        twice,
        missing,
        [line.split("|")[1].strip() for line in text if line.startswith("|")],
        sorted(profiler.recorded_durations),
        sorted(os.listdir()),
    ]


@ask
def other_profilers() -> Any:
    passing = profilers.PassThroughProfiler()
    with passing.profile("x"):
        pass
    advanced = profilers.AdvancedProfiler()
    return [
        passing.summary(),
        attempt(lambda: advanced.stop("never")),
        advanced.summary(),
        attempt(lambda: profilers.Profiler().start("x")),
    ]
