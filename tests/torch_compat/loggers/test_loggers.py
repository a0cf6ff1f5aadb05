"""Effects of loggers that comparing files with Lightning's does not show."""

from __future__ import annotations

import pickle
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_compat.loggers import CSVLogger, TensorBoardLogger
from torch_compat.loggers.logger import DummyExperiment, DummyLogger, Logger, rank_zero_experiment
from torch_compat.loggers.utilities import combined_version
from torch_compat.utilities.hyperparameters import as_dict, call_callables, flatten, json_values, plain_values
from torch_compat.utilities.rank_zero import rank_zero_only


@dataclass
class _Options:
    depth: int
    widths: list[int]


class _MemoryLogger(Logger):
    """A logger as a user writes it: the four abstract members and an experiment."""

    name = "memory"
    version = 1

    def __init__(self) -> None:
        self.logged: list[Any] = []

    @property
    @rank_zero_experiment
    def experiment(self) -> list[Any]:
        return self.logged

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.append((step, metrics))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.experiment.append(params)


@pytest.fixture
def other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)


def test_user_defined_logger_has_the_optional_methods() -> None:
    logger = _MemoryLogger()
    logger.log_metrics({"a": 1.0}, 2)
    logger.log_graph(torch.nn.Linear(1, 1))
    logger.finalize("success")
    assert logger.logged == [(2, {"a": 1.0})]
    assert (logger.save_dir, logger.root_dir, logger.log_dir, logger.group_separator) == (None, None, None, "/")


@pytest.mark.usefixtures("other_process")
def test_only_process_zero_writes(tmp_path: Path) -> None:
    for logger in (CSVLogger(tmp_path), TensorBoardLogger(tmp_path)):
        logger.log_hyperparams({"a": 1})
        logger.log_metrics({"a": 1.0}, 0)
        logger.save()
        logger.finalize("success")
        assert isinstance(logger.experiment, DummyExperiment)
        logger.experiment.anything(1)
        logger.experiment[3] = 4  # as user code does on every process
    assert list(tmp_path.iterdir()) == []
    user_defined = _MemoryLogger()
    user_defined.log_metrics({"a": 1.0}, 0)
    assert user_defined.logged == []


def test_csv_logger_warns_before_it_deletes(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, name=None, version=0)
    first.log_metrics({"a": 1.0}, 0)
    first.save()
    with pytest.warns(UserWarning, match=r"version_0 is not empty.*another `version`"):
        second = CSVLogger(tmp_path, name=None, version=0).experiment
    assert not Path(second.metrics_file_path).exists()


def test_csv_logger_writes_nothing_without_metrics(tmp_path: Path) -> None:
    CSVLogger(tmp_path / "logs").finalize("success")
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_names_what_it_cannot_log(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    with pytest.raises(ValueError, match=r"'sizes'.*list \[1, 2\].*add_histogram"):
        logger.log_metrics({"sizes": [1, 2]}, 0)
    with pytest.raises(ValueError, match="'vector'"):
        logger.log_metrics({"vector": torch.zeros(2)}, 0)
    logger.finalize("failed")


def test_tensorboard_logger_can_be_sent_to_another_process(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    copy = pickle.loads(pickle.dumps(logger))
    assert copy.log_dir == logger.log_dir
    logger.finalize("failed")


def test_tensorboard_expands_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGS", str(tmp_path))
    assert TensorBoardLogger("$LOGS", version=2).log_dir == f"{tmp_path}/lightning_logs/version_2"


def test_dummy_logger_takes_every_call() -> None:
    logger = DummyLogger()
    logger.log_metrics({"a": 1.0})
    logger.log_hyperparams({"a": 1})
    logger.watch("a model", log="all")
    logger[0].experiment.add_image("name", None)
    assert (logger.name, logger.version) == ("", "")
    assert pickle.loads(pickle.dumps(logger)).name == ""


def test_combined_version() -> None:
    csv, named = CSVLogger("nowhere", version=3), CSVLogger("nowhere", version="x")
    assert combined_version([csv]) == 3
    assert combined_version([csv, named, csv]) == "3_x"


def test_hyperparameters_for_loggers() -> None:
    assert as_dict(None) == {} and as_dict(Namespace(a=1)) == {"a": 1}
    nested = {"a": {"b": Namespace(c=1)}, 5: _Options(2, [3]), "list": [{"x": 1}, {"y": 2}], "empty": {}, "numbers": [1, 2]}
    assert flatten(nested) == {
        "a/b/c": 1, "5/depth": 2, "5/widths": [3], "list/0/x": 1, "list/1/y": 2, "numbers": [1, 2],
    }  # fmt: skip
    matrix = torch.eye(2)
    values = {"a": np.float32(0.5), "b": [1], "c": True, "d": matrix, "e": torch.tensor(1.0), "f": None}
    assert plain_values(values) == {"a": 0.5, "b": "[1]", "c": True, "d": str(matrix), "e": torch.tensor(1.0), "f": "None"}
    assert call_callables({"a": torch.nn.Linear, "b": lambda: 3, "c": lambda: len, "d": abs, "e": 1}) == {
        "a": "Linear", "b": 3, "c": "<lambda>", "d": "abs", "e": 1,
    }  # fmt: skip
    assert json_values({"a": 1, "b": torch.float32, "c": [1]}) == {"a": 1, "b": "torch.float32", "c": [1]}
