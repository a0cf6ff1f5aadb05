"""MLFlowLogger and CometLogger, against stand-ins for their packages that record what they are asked.

MLFlowLogger was compared with Lightning's against the real mlflow-skinny: same parameters, tags, metric history and artifacts.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pickle
import sys
import types
from typing import Any

import pytest

from torch_compat.loggers import CometLogger, LitLogger, MLFlowLogger
from torch_compat.loggers.neptune import NeptuneLogger
from torch_compat.utilities.exceptions import MisconfigurationException


def module(name: str, **attributes: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(attributes)
    return made


class Client:
    """Records calls; knows no experiment."""

    def __init__(self, uri: str = "") -> None:
        self.uri = uri
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        return f"id of {name}"

    def create_run(self, experiment_id: str, tags: dict[str, Any]) -> Any:
        self.calls.append(("create_run", (experiment_id,), tags))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="run", experiment_id=experiment_id))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs)) or True


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    entity = lambda **fields: {key: value for key, value in fields.items() if key != "timestamp"}  # noqa: E731
    modules = [
        module("mlflow", set_tracking_uri=lambda uri: None),
        module("mlflow.tracking", MlflowClient=Client),
        module("mlflow.tracking.context"),
        module("mlflow.tracking.context.registry", resolve_tags=lambda tags: dict(tags or {})),
        module("mlflow.utils"),
        module("mlflow.utils.mlflow_tags", MLFLOW_RUN_NAME="mlflow.runName"),
        module("mlflow.entities", Param=entity, Metric=entity),
    ]
    for one in modules:
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.usefixtures("mlflow")
def test_mlflow_run_is_started_when_first_used_and_ended() -> None:
    logger = MLFlowLogger("mine", run_name="r", tags={"a": "b"}, save_dir="d", prefix="p", synchronous=True)
    client = logger._mlflow_client
    logger.finalize("success")
    assert client.calls == []
    with pytest.warns(RuntimeWarning, match="p-x%y is logged as p-xy"):
        logger.log_metrics({"x%y": 1.5, "text": "no number"}, step=3)
    logger.log_hyperparams({"lr": 0.1, "net": {"depth": 2}, "long": "x" * 300, **{f"n{i}": i for i in range(100)}})
    logger.finalize("failed")
    started, metrics, first, second, _, ended = client.calls
    assert started == ("create_run", ("id of mine",), {"a": "b", "mlflow.runName": "r"})
    assert metrics[2] == {"run_id": "run", "metrics": [{"key": "p-xy", "value": 1.5, "step": 3}], "synchronous": True}
    assert first[2]["params"][:2] == [{"key": "lr", "value": "0.1"}, {"key": "net/depth", "value": "2"}]
    assert len(first[2]["params"][2]["value"]) == 250
    assert (len(first[2]["params"]), len(second[2]["params"])) == (100, 3)
    assert ended == ("set_terminated", ("run", "FAILED"), {})
    assert (logger.name, logger.version, logger.save_dir, client.uri) == ("id of mine", "run", "d", "file:d")
    assert MLFlowLogger(tracking_uri="http://server").save_dir is None


class Experiment(Client):
    project_name = "project"

    def get_key(self) -> str:
        return "key"


def test_comet(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    config = lambda **options: types.SimpleNamespace(offline_directory=None, **options)  # noqa: E731
    start = lambda **options: started.append(options) or Experiment()  # noqa: E731
    monkeypatch.setitem(sys.modules, "comet_ml", module("comet_ml", ExperimentConfig=config, start=start))
    logger = CometLogger(workspace="w", project="p", online=False, prefix="x", name="n")
    logger.log_metrics({"loss": 1.0, "epoch": 2.0}, step=7)
    logger.log_hyperparams({"net": {"depth": 2}})
    logger.finalize("success")
    assert [call[0] for call in logger.experiment.calls] == ["log_other", "log_metrics", "log_parameters", "flush"]
    assert logger.experiment.calls[1][1:] == (({"loss": 1.0},), {"step": 7, "epoch": 2, "prefix": "x"})
    assert logger.experiment.calls[2][1] == ({"net/depth": 2},)
    assert (logger.name, logger.version, started[0]["online"], started[0]["experiment_config"].name) == (
        "project",
        "key",
        False,
        "n",
    )
    logger._config = None
    again = pickle.loads(pickle.dumps(logger))
    assert again.experiment.get_key() == started[1]["experiment_key"] == "key"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None)
    for kind, package in ((MLFlowLogger, "mlflow"), (CometLogger, "comet-ml"), (LitLogger, "litlogger")):
        with pytest.raises(ModuleNotFoundError, match=package):
            kind()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: object())
    with pytest.raises(MisconfigurationException, match=r"LitLogger is not supported.*MLFlowLogger"):
        LitLogger()
    with pytest.raises(RuntimeError, match="Neptune has been sunset"):
        NeptuneLogger()
