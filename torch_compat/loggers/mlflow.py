"""``MLFlowLogger``: MLflow tracking."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from torch_compat.loggers.checkpoints import SavedCheckpoint, scan_checkpoints
from torch_compat.loggers.logger import Logger, rank_zero_experiment
from torch_compat.utilities.hyperparameters import add_prefix, as_dict, call_callables, flatten
from torch_compat.utilities.rank_zero import LOGGER_NAME, rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from torch_compat.callbacks.model_checkpoint import ModelCheckpoint

log = logging.getLogger(f"{LOGGER_NAME}.loggers.mlflow")

LOCAL_FILE_URI_PREFIX = "file:"
_MAX_PARAMS = 100  # of one request
_MAX_VALUE_LENGTH = 250
_NOT_IN_NAMES = re.compile("[^a-zA-Z0-9_/. -]+")
_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}
_CHECKPOINT_OPTIONS = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "_every_n_train_steps")


class MLFlowLogger(Logger):
    """Logs to an MLflow tracking server, or to local files.

    Process 0 starts a run when the first thing is logged.

    Args:
        experiment_name: the experiment; made if there is none of that name.
        run_name: name of the run.
        tracking_uri: the server; default: ``$MLFLOW_TRACKING_URI``, else ``file:<save_dir>``, which MLflow 3.13 and later
            refuse unless ``MLFLOW_ALLOW_FILE_STORE=true``: pass ``"sqlite:///mlflow.db"`` there.
        tags: tags of the run.
        save_dir: directory of local files.
        log_model: upload checkpoints as artifacts: False never, True at the end of the run (with ``save_top_k=-1``: as they are
            committed), "all" as they are committed.
        prefix: put before every metric's key, followed by "-".
        artifact_location: where the experiment's artifacts go.
        run_id: a run to log to.
        synchronous: whether logging waits for the server; default: MLflow's.

    Raises:
        ModuleNotFoundError: neither ``mlflow`` nor ``mlflow-skinny`` is installed.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.loggers.mlflow.html
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | None = "./mlruns",
        log_model: Literal[True, False, "all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise ModuleNotFoundError(
                "MLFlowLogger needs `mlflow`, which is not installed: `pip install mlflow` "
                "(or `mlflow-skinny`, which logs to a tracking server)."
            )
        super().__init__()
        self._experiment_name = experiment_name
        self._experiment_id: str | None = None
        self._tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{LOCAL_FILE_URI_PREFIX}{save_dir}"
        self._run_name = run_name
        self._run_id = run_id
        self.tags = tags
        self._log_model = log_model
        self._prefix = prefix
        self._artifact_location = artifact_location
        self._options: dict[str, Any] = {} if synchronous is None else {"synchronous": synchronous}
        self._logged_checkpoints: dict[str, float] = {}
        self._checkpoint_callback: ModelCheckpoint | None = None
        self._initialized = False
        self._mlflow_client: Any = _client(self._tracking_uri)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``MlflowClient``; the run is started when first asked on process 0."""
        if not self._initialized:
            importlib.import_module("mlflow").set_tracking_uri(self._tracking_uri)
            if self._run_id is not None:
                self._experiment_id = self._mlflow_client.get_run(self._run_id).info.experiment_id
            else:
                self._experiment_id = self._experiment_id or self._find_experiment()
                self._run_id = self._start_run()
            self._initialized = True
        return self._mlflow_client

    def _find_experiment(self) -> str:
        found = self._mlflow_client.get_experiment_by_name(self._experiment_name)
        if found is not None:
            return found.experiment_id
        log.warning(f"Experiment with name {self._experiment_name} not found. Creating it.")
        return self._mlflow_client.create_experiment(name=self._experiment_name, artifact_location=self._artifact_location)

    def _start_run(self) -> str:
        if self._run_name is not None:
            key = _mlflow("utils.mlflow_tags").MLFLOW_RUN_NAME
            self.tags = dict(self.tags or {})
            if key in self.tags:
                log.warning(f"The tag {key} is found in tags. The value will be overridden by {self._run_name}, the `run_name`.")
            self.tags[key] = self._run_name
        tags = _mlflow("tracking.context.registry").resolve_tags(self.tags)
        return self._mlflow_client.create_run(experiment_id=self._experiment_id, tags=tags).info.run_id

    @property
    def run_id(self) -> str | None:
        """Id of the run, which is started if there is none yet."""
        _ = self.experiment
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """Id of the experiment, which is made if there is none yet."""
        _ = self.experiment
        return self._experiment_id

    @property
    def name(self) -> str | None:
        """Id of the experiment."""
        return self.experiment_id

    @property
    def version(self) -> str | None:
        """Id of the run."""
        return self.run_id

    @property
    def save_dir(self) -> str | None:
        """Directory of local files; None with a server."""
        uri = self._tracking_uri
        return uri[len(LOCAL_FILE_URI_PREFIX) :] if uri.startswith(LOCAL_FILE_URI_PREFIX) else None

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        entity = _mlflow("entities").Param
        values = flatten(call_callables(as_dict(params)))
        entities = [entity(key=key, value=str(value)[:_MAX_VALUE_LENGTH]) for key, value in values.items()]
        for start in range(0, len(entities), _MAX_PARAMS):
            self.experiment.log_batch(run_id=self.run_id, params=entities[start : start + _MAX_PARAMS], **self._options)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        entity = _mlflow("entities").Metric
        now_ms = int(time.time() * 1000)
        entities = []
        for key, value in add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR).items():
            if isinstance(value, str):
                log.warning(f"Discarding metric with string value {key}={value}.")
                continue
            name = _NOT_IN_NAMES.sub("", key)
            if name != key:
                rank_zero_warn(
                    f"MLFlow only allows letters, digits, spaces and _ / . - in the name of a metric: {key} is logged as {name}.",
                    category=RuntimeWarning,
                )
            entities.append(entity(key=name, value=float(value), timestamp=now_ms, step=step or 0))
        self.experiment.log_batch(run_id=self.run_id, metrics=entities, **self._options)

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        if not self._initialized:
            return
        if self._checkpoint_callback is not None:
            self._log_checkpoints(self._checkpoint_callback)
        if self.experiment.get_run(self.run_id):
            self.experiment.set_terminated(self.run_id, _STATUS.get(status, status))

    # -- artifacts -----------------------------------------------------------------------------------------------------

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        if self._log_model == "all" or (self._log_model is True and checkpoint_callback.save_top_k == -1):
            self._log_checkpoints(checkpoint_callback)
        if self._log_model:
            self._checkpoint_callback = checkpoint_callback  # for what is committed later

    def _log_checkpoints(self, callback: ModelCheckpoint) -> None:
        for checkpoint in scan_checkpoints(callback, self._logged_checkpoints):
            self._log_checkpoint(checkpoint, callback)
            self._logged_checkpoints[checkpoint.path] = checkpoint.saved_at

    def _log_checkpoint(self, checkpoint: SavedCheckpoint, callback: ModelCheckpoint) -> None:
        metadata = {
            "score": checkpoint.score,
            "original_filename": Path(checkpoint.path).name,
            "Checkpoint": {name: getattr(callback, name) for name in _CHECKPOINT_OPTIONS if hasattr(callback, name)},
        }
        aliases = ["latest", "best"] if checkpoint.path == callback.best_model_path else ["latest"]
        folder = Path(checkpoint.path).stem
        self.experiment.log_artifact(self.run_id, checkpoint.path, folder)
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as directory:
            (Path(directory) / "metadata.yaml").write_text(yaml.safe_dump(metadata))
            (Path(directory) / "aliases.txt").write_text(str(aliases))
            self.experiment.log_artifacts(self.run_id, directory, folder)


def _client(uri: str) -> Any:
    try:
        return _mlflow("tracking").MlflowClient(uri)
    except Exception as error:
        if uri.startswith(LOCAL_FILE_URI_PREFIX):
            error.add_note(
                "MLFlowLogger logs into a folder of files unless it is told otherwise. With this MLflow pass "
                "tracking_uri='sqlite:///mlflow.db' (the package mlflow, not mlflow-skinny), set MLFLOW_TRACKING_URI to a "
                "server, or set MLFLOW_ALLOW_FILE_STORE=true."
            )
        raise


def _mlflow(module: str) -> Any:
    """A module of the package, imported when it is first needed: it is optional, and slow to import."""
    return importlib.import_module(f"mlflow.{module}")
