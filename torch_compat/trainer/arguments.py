"""The Trainer's arguments: checked, and defaults filled in. Nothing here starts JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from torch_compat.utilities.durations import to_timedelta
from torch_compat.utilities.exceptions import ArgumentTypeError, ArgumentValueError, MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn


@dataclass
class Options:
    """Arguments after checks and defaults; named as the Trainer's."""

    fast_dev_run: int | bool
    max_epochs: int | None
    max_steps: int
    max_time: timedelta | None
    overfit_batches: int | float
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    val_check_interval: int | float
    val_check_seconds: float | None
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | float
    log_every_n_steps: int
    accumulate_grad_batches: int
    logger: Any
    enable_checkpointing: bool
    enable_progress_bar: bool
    enable_model_summary: bool
    barebones: bool


def check(given: Mapping[str, Any]) -> Options:
    """Check the arguments of ``Trainer(…)`` by name.

    Raises:
        MisconfigurationException: a value out of range, arguments that contradict each other, or one that is refused.
        ValueError: ``barebones=True`` with a feature that it turns off.
    """
    _refuse(given)
    _check_kinds(given)
    _check_clipping(given["gradient_clip_val"], given["gradient_clip_algorithm"])
    _check_counts(given)
    _set_determinism(given["deterministic"], given["benchmark"])
    values = {name: given[name] for name in Options.__annotations__ if name in given}
    values["max_time"] = (
        None
        if given["max_time"] is None
        else to_timedelta(given["max_time"], "`Timer(duration={!r})` is not a valid duration of max_time")
    )
    if given["barebones"]:
        _apply_barebones(given, values)
    _apply_defaults(values)
    _apply_fast_dev_run(values)
    if not values["fast_dev_run"]:
        _say_what_one_means(given)
    _apply_overfit(values)
    return Options(**values)


def _refuse(given: Mapping[str, Any]) -> None:
    if given["model_registry"] is not None:
        raise MisconfigurationException(
            f"model_registry={given['model_registry']!r} is not supported: it uploads to a Lightning service; save with "
            "trainer.save_checkpoint and upload the directory yourself"
        )
    if given["sync_batchnorm"]:
        rank_zero_info("sync_batchnorm: BatchNorm always sees the global batch in a compiled step; nothing to convert.")
    if given["benchmark"]:
        rank_zero_info("benchmark: cuDNN's autotuner is XLA's affair here (it autotunes when it compiles).")
    if not given["inference_mode"]:
        rank_zero_info(
            "inference_mode=False: a compiled evaluation step runs under no_grad either way; enable gradients in it if "
            "you need them."
        )
    if given["detect_anomaly"] and not isinstance(given["detect_anomaly"], bool):
        raise TypeError(f"The provided `detect_anomaly` argument should be a `bool`, found {given['detect_anomaly']!r}")


_SWITCHES = (
    "barebones",
    "benchmark",
    "enable_checkpointing",
    "enable_model_summary",
    "enable_progress_bar",
    "inference_mode",
    "sync_batchnorm",
    "use_distributed_sampler",
)


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Arguments of which only the kind can be wrong."""
    for name in _SWITCHES:
        if given.get(name) not in (None, True, False):
            raise MisconfigurationException(f"`{name}` should be True or False, got {given[name]!r}")
    for name in ("min_epochs", "min_steps"):
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise MisconfigurationException(f"`{name}` should be a non-negative int or None, got {value!r}")
    sanity = given["num_sanity_val_steps"]
    if sanity is not None and (not isinstance(sanity, int | float) or sanity < -1):
        raise MisconfigurationException(f"`num_sanity_val_steps` should be a number of batches, or -1 for all, got {sanity!r}")
    nodes = given.get("num_nodes", 1)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ArgumentValueError(f"`num_nodes` must be a positive integer, but got {nodes!r}: it is the number of hosts")
    root = given.get("default_root_dir")
    if root is not None and not isinstance(root, str | os.PathLike):
        raise ArgumentTypeError(f"`default_root_dir` should be a path, got {root!r}")


def _check_clipping(value: Any, algorithm: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise TypeError(f"`gradient_clip_val` should be an int or a float. Got {value!r}.")
    if algorithm is not None and str(algorithm).lower() not in ("norm", "value"):
        raise MisconfigurationException(
            f"`gradient_clip_algorithm` {algorithm!r} is invalid. Allowed algorithms: ['value', 'norm']."
        )


def _check_counts(given: Mapping[str, Any]) -> None:
    accumulate = given["accumulate_grad_batches"]
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise MisconfigurationException(
            f"`accumulate_grad_batches` should be a positive int, but got {accumulate!r}; for a schedule use the "
            "`GradientAccumulationScheduler` callback"
        )
    reload_every = given["reload_dataloaders_every_n_epochs"]
    if not isinstance(reload_every, int) or reload_every < 0:
        raise MisconfigurationException(f"`reload_dataloaders_every_n_epochs` should be an int >= 0, got {reload_every!r}.")
    every = given["check_val_every_n_epoch"]
    if every is not None and (not isinstance(every, int) or every < 1):
        raise MisconfigurationException(
            f"`check_val_every_n_epoch` should be an integer, found {every!r}: a positive integer, or None"
        )
    interval = given["val_check_interval"]
    if every is None and isinstance(interval, float):
        raise MisconfigurationException(
            "`val_check_interval` should be an integer or a time-based duration when `check_val_every_n_epoch=None`, "
            f"found {interval!r}."
        )
    log_every = given["log_every_n_steps"]
    if log_every is not None and (not isinstance(log_every, int) or log_every < 0):
        raise MisconfigurationException(f"`log_every_n_steps` should be an int >= 0, got {log_every!r}")


def _set_determinism(deterministic: Any, benchmark: Any) -> None:
    if deterministic not in (None, True, False, "warn"):
        raise MisconfigurationException(f"`deterministic` should be True, False or 'warn', got {deterministic!r}")
    if deterministic and benchmark:
        rank_zero_warn(
            "You passed `deterministic=True` and `benchmark=True`. Note that cuDNN's choice of the fastest algorithm, which "
            "`benchmark` asks of an eager run on a GPU, is not the same each time."
        )
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")


_BAREBONES_OFF = {
    "enable_checkpointing": (False, False),
    "logger": (False, False),
    "enable_progress_bar": (False, False),
    "enable_model_summary": (False, False),
    "log_every_n_steps": (0, 0),
    "num_sanity_val_steps": (0, 0),
}


def _apply_barebones(given: Mapping[str, Any], values: dict[str, Any]) -> None:
    for name, (allowed, value) in _BAREBONES_OFF.items():
        if given[name] is not None and given[name] is not allowed and given[name] != allowed:
            raise ValueError(
                f"`Trainer(barebones=True, {name}={given[name]!r})` was passed. This feature is turned off in barebones mode"
            )
        values[name] = value
    for name, off in (("fast_dev_run", False), ("detect_anomaly", False), ("profiler", None)):
        if given[name] not in (off, None):
            raise ValueError(
                f"`Trainer(barebones=True, {name}={given[name]!r})` was passed. Development features can impact raw speed"
            )
    rank_zero_info(
        "You are running in `Trainer(barebones=True)` mode, which measures what the loop itself costs. These "
        "are off: checkpoints, progress bar, model summary, loggers and `self.log`, "
        "sanity checking, `fast_dev_run`, `detect_anomaly`, profiling."
    )


def _apply_defaults(values: dict[str, Any]) -> None:
    def default(name: str, value: Any) -> None:
        if values[name] is None:
            values[name] = value

    for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"):
        values[name] = _batches_limit(1.0 if values[name] is None else values[name], name)
    values["overfit_batches"] = _batches_limit(values["overfit_batches"], "overfit_batches")
    values["val_check_interval"], values["val_check_seconds"] = _val_check(values["val_check_interval"])
    default("num_sanity_val_steps", 2)
    if values["num_sanity_val_steps"] == -1:
        values["num_sanity_val_steps"] = float("inf")
    default("log_every_n_steps", 50)
    default("enable_checkpointing", True)
    default("enable_progress_bar", True)
    default("enable_model_summary", True)


_WHAT_ONE_MEANS = {
    "limit_train_batches": ("1 batch per epoch will be used", "100% of the batches per epoch will be used"),
    "val_check_interval": ("validation will run after every batch", "validation will run at the end of the training epoch"),
}
_WHAT_ONE_MEANS |= dict.fromkeys(
    ("limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"),
    ("1 batch will be used", "100% of the batches will be used"),
)


def _say_what_one_means(given: Mapping[str, Any]) -> None:
    """Say what ``1`` or ``1.0`` means for an argument: they are easily mistaken for each other."""
    for name, (whole, fraction) in _WHAT_ONE_MEANS.items():
        if (value := given.get(name)) == 1 and isinstance(value, int | float):
            meaning = whole if isinstance(value, int) else fraction
            rank_zero_info(f"`Trainer({name}={value})` was configured so {meaning}.")


def _val_check(interval: Any) -> tuple[int | float, float | None]:
    """``val_check_interval`` as batches or a fraction, and in seconds where it is a duration."""
    if interval is None:
        return 1.0, None
    if isinstance(interval, str | timedelta | dict):
        return 1.0, to_timedelta(interval, "Invalid time format for `val_check_interval`: {!r}").total_seconds()
    return _batches_limit(interval, "val_check_interval"), None


def _batches_limit(value: Any, name: str) -> int | float:
    """A number of batches (int) or a fraction of them (float).

    Raises:
        MisconfigurationException: neither.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"`{name}` should be an int (batches) or a float in [0.0, 1.0] (a fraction), got {value!r}")
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    if value >= 0 and float(value).is_integer():
        return int(value)
    raise MisconfigurationException(
        f"You have passed invalid value {value} for {name}, it has to be in [0.0, 1.0] or an int: a part, or a number of batches"
    )


def _apply_fast_dev_run(values: dict[str, Any]) -> None:
    runs = values["fast_dev_run"]
    if not isinstance(runs, bool | int):
        raise ArgumentValueError(
            f"fast_dev_run={runs!r} is not a valid configuration. It should be True, False or >= 0, a number of batches"
        )
    if runs < 0:
        raise MisconfigurationException(
            f"fast_dev_run={runs!r} is not a valid configuration. It should be >= 0, a number of batches"
        )
    if runs is False or runs == 0:
        return
    count = int(runs)
    values["fast_dev_run"] = True if count == 1 else count
    for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "max_steps"):
        values[name] = count
    values["num_sanity_val_steps"] = 0
    values["max_epochs"] = 1
    values["val_check_interval"], values["val_check_seconds"] = 1.0, None
    values["check_val_every_n_epoch"] = 1
    values["logger"] = "dummy" if values["logger"] not in (False, None) or values["logger"] is None else False
    values["enable_checkpointing"] = values["enable_checkpointing"] and "no_save"
    rank_zero_info(
        f"Running in `fast_dev_run` mode: will run the requested loop using {count} batch(es), without loggers and checkpoints."
    )


def _apply_overfit(values: dict[str, Any]) -> None:
    if values["overfit_batches"] > 0:
        values["limit_train_batches"] = values["overfit_batches"]
        values["limit_val_batches"] = values["overfit_batches"]
