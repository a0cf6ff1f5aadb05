"""WandbLogger, against a stand-in for the package wandb that records what it is asked."""

from __future__ import annotations

import importlib.machinery
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_compat.callbacks import ModelCheckpoint
from torch_compat.loggers import WandbLogger
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.checkpoint import save


class _Run:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.id = options["id"] or "generated"
        self.name = options["name"]
        self._attach_id = f"attach-{self.id}"
        self.calls: list[Any] = []
        self.config = types.SimpleNamespace(update=lambda values, **kw: self.calls.append(("config", values, kw)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


class _Artifact:
    def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
        self.name, self.type, self.metadata, self.directories = name, type, metadata, []

    def add_dir(self, path: str, name: str, policy: str) -> None:
        self.directories.append((Path(path).name, name, policy))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.run = None
    module.init = lambda **options: _Run(options)
    module._attach = lambda attach_id: _Run({"id": attach_id, "name": None})
    module.Artifact = _Artifact
    for kind in ("Image", "Audio", "Video", "Table"):
        setattr(module, kind, lambda *args, kind=kind, **options: (kind, args, options))
    monkeypatch.setitem(sys.modules, "wandb", module)
    yield module


def _calls(logger: WandbLogger, name: str) -> list[Any]:
    return [call for call in logger.experiment.calls if call[0] == name]


def test_without_wandb_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs `wandb`.* `pip install 'wandb"):
        WandbLogger()


@pytest.mark.usefixtures("wandb")
def test_offline_with_log_model_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="log_model='all', offline=True"):
        WandbLogger(offline=True, log_model="all")


@pytest.mark.usefixtures("wandb")
def test_run_is_started_with_the_options_when_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "from environment")
    logger = WandbLogger(name="n", save_dir=Path("d"), version="v", offline=True, tags=["t"], anonymous=True)
    assert (logger.name, logger.version, logger.save_dir) == ("from environment", "v", "d")
    assert logger._experiment is None
    assert logger.experiment.options == {
        "name": "n", "project": "from environment", "dir": "d", "id": "v", "resume": "allow", "anonymous": "allow",
        "mode": "offline", "tags": ["t"],
    }  # fmt: skip
    assert [call[1] for call in _calls(logger, "define_metric")] == [("trainer/global_step",), ("*",)]


def test_run_of_the_script_is_used(wandb: Any) -> None:
    wandb.run = _Run({"id": "mine", "name": None})
    with pytest.warns(UserWarning, match=r"wandb\.finish"):
        assert WandbLogger().experiment is wandb.run


@pytest.mark.usefixtures("wandb")
def test_metrics_and_hyperparameters() -> None:
    logger = WandbLogger(prefix="p")
    logger.log_metrics({"a": 1.0}, 3)
    logger.log_metrics({"a": 2.0})
    assert [call[1][0] for call in _calls(logger, "log")] == [{"p-a": 1.0, "trainer/global_step": 3}, {"p-a": 2.0}]
    logger.log_hyperparams({"layer": torch.nn.Linear, "array": np.zeros(1), "lr": 0.1})
    assert _calls(logger, "config") == [("config", {"layer": "Linear", "array": "[0.]", "lr": 0.1}, {"allow_val_change": True})]
    board = WandbLogger(sync_tensorboard=True)
    board.log_metrics({"a": 1.0}, 3)
    assert _calls(board, "log")[0][1] == ({"a": 1.0},)


@pytest.mark.usefixtures("wandb")
def test_media() -> None:
    logger = WandbLogger()
    logger.log_image("i", ["a.png", "b.png"], step=1, caption=["A", "B"])
    logger.log_text("t", columns=["c"], data=[["x"]])
    assert [call[1][0] for call in _calls(logger, "log")] == [
        {"i": [("Image", ("a.png",), {"caption": "A"}), ("Image", ("b.png",), {"caption": "B"})], "trainer/global_step": 1},
        {"t": ("Table", (), {"columns": ["c"], "data": [["x"]], "dataframe": None})},
    ]
    with pytest.raises(TypeError, match="log_audio: expected a list as 'audios', found str"):
        logger.log_audio("a", "one.wav")
    with pytest.raises(ValueError, match="'fps' needs one value for each of the 1 videos, found 2"):
        logger.log_video("v", ["v.mp4"], fps=[1, 2])


@pytest.mark.usefixtures("wandb")
def test_another_process_attaches_to_the_run() -> None:
    logger = WandbLogger(version="v")
    copy = pickle.loads(pickle.dumps(logger))
    assert copy.version == "v"
    assert copy.experiment.id == "attach-v"


@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize("log_model", [True, "all", False])
def test_checkpoints_become_artifacts(log_model: Any, tmp_path: Path) -> None:
    logger, callback = WandbLogger(log_model=log_model), ModelCheckpoint(tmp_path, monitor="loss")
    for step, score in enumerate([0.5, 0.25]):
        path = str(tmp_path / f"step={step}.ckpt")
        save(path, {"w": np.zeros(2)}, {}, wait=True)
        callback.best_k_models[path] = callback.current_score = callback.best_model_score = torch.tensor(score)
        callback.best_model_path = path
        logger.after_save_checkpoint(callback)
        logger.after_save_checkpoint(callback)  # nothing new: nothing is uploaded twice
    during_run = [call[1][0].directories[0][0] for call in _calls(logger, "log_artifact")]
    assert during_run == (["step=0.ckpt", "step=1.ckpt"] if log_model == "all" else [])
    logger.finalize("failed")
    assert len(_calls(logger, "log_artifact")) == len(during_run)
    logger.finalize("success")
    uploads = _calls(logger, "log_artifact")
    if not log_model:
        assert uploads == []
        return
    artifact, aliases = uploads[-1][1][0], uploads[-1][2]["aliases"]
    assert [call[1][0].directories for call in uploads] == [[(f"step={i}.ckpt", "model.ckpt", "mutable")] for i in range(2)]
    assert (artifact.name, artifact.type, aliases) == ("model-generated", "model", ["latest", "best"])
    assert artifact.metadata["score"] == 0.25
    assert artifact.metadata["ModelCheckpoint"]["monitor"] == "loss"
