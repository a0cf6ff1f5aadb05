"""``WandbLogger``: Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch_compat.loggers.checkpoints import SavedCheckpoint, scan_checkpoints
from torch_compat.loggers.logger import Logger, rank_zero_experiment
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.hyperparameters import add_prefix, as_dict, call_callables, json_values
from torch_compat.utilities.rank_zero import rank_zero_only, rank_zero_warn
from xlatrain.supported import how_to_install

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from torch import nn

    from torch_compat.callbacks.model_checkpoint import ModelCheckpoint

_STEP = "trainer/global_step"
_CHECKPOINT_OPTIONS = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "_every_n_train_steps")


def _wandb() -> Any:
    """The package, imported when it is first needed: it is optional, and slow to import."""
    return importlib.import_module("wandb")


class WandbLogger(Logger):
    """Logs to Weights & Biases, with the optimizer step as ``trainer/global_step`` on the x-axis.

    A run is started by process 0 when the first thing is logged; a run that the script has started itself is used.

    Args:
        name: display name of the run.
        save_dir: directory for wandb's files.
        version: id of the run, to resume it.
        offline: keep the run local, to be uploaded later by ``wandb sync``.
        dir: as ``save_dir``, used if that is None or "".
        id: as ``version``, used if that is None or "".
        anonymous: allow runs without an account.
        project: project of the run; default ``$WANDB_PROJECT``, else "lightning_logs".
        log_model: upload checkpoints as artifacts: False never, True at the end of a run that succeeds (with ``save_top_k=-1``:
            as they are committed), "all" as they are committed.
        experiment: a run to log to.
        prefix: put before every metric's key, followed by "-".
        checkpoint_name: name of the artifacts; default ``model-<id of the run>``.
        add_file_policy: "mutable" copies checkpoints before the upload, "immutable" trusts that they stay as they are.
        kwargs: for ``wandb.init``: ``entity``, ``group``, ``tags``, ...

    Raises:
        ModuleNotFoundError: ``wandb`` is not installed.
        MisconfigurationException: ``log_model`` with ``offline``.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.loggers.wandb.html
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Literal["all"] | bool = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError(f"WandbLogger needs `wandb`, which is not installed: `{how_to_install('wandb')}`.")
        if offline and log_model:
            raise MisconfigurationException(
                f"WandbLogger(log_model={log_model!r}, offline=True): checkpoints cannot be uploaded offline. Drop one of them."
            )
        super().__init__()
        self.add_file_policy = add_file_policy
        directory = save_dir or dir
        self._wandb_init: dict[str, Any] = {
            "name": name,
            "project": project or os.environ.get("WANDB_PROJECT", "lightning_logs"),
            "dir": None if directory is None else os.fspath(directory),
            "id": version or id,
            "resume": "allow",
            "anonymous": "allow" if anonymous else None,
            **({"mode": "offline"} if offline else {}),
            **kwargs,
        }
        self._id: str | None = self._wandb_init["id"]
        self._attach_id: str | None = None
        self._log_model = log_model
        self._experiment = experiment
        self._prefix = prefix
        self._checkpoint_name = checkpoint_name
        self._logged_checkpoints: dict[str, float] = {}
        self._checkpoint_callbacks: dict[int, ModelCheckpoint] = {}

    def __getstate__(self) -> dict[str, Any]:
        # The process that the logger is sent to attaches to the run that is started here.
        experiment = self.experiment
        attach_id = getattr(experiment, "_attach_id", None)
        return {**self.__dict__, "_id": experiment.id, "_attach_id": attach_id, "_experiment": None, "_checkpoint_callbacks": {}}

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The wandb run; started when first asked on process 0."""
        if self._experiment is None:
            self._experiment = self._start_run()
        return self._experiment

    def _start_run(self) -> Any:
        wandb = _wandb()
        if wandb.run is not None:
            rank_zero_warn("WandbLogger logs to the wandb run in progress. For a run of its own, call `wandb.finish()` before.")
            return wandb.run
        if self._attach_id is not None and hasattr(wandb, "_attach"):
            return wandb._attach(self._attach_id)
        run = wandb.init(**self._wandb_init)
        if hasattr(run, "define_metric"):
            if self._wandb_init.get("sync_tensorboard"):
                run.define_metric("*", step_metric="global_step")
            else:
                run.define_metric(_STEP)
                run.define_metric("*", step_metric=_STEP, step_sync=True)
        return run

    @property
    def name(self) -> str | None:
        """The project; the run's own name is ``experiment.name``."""
        return self._wandb_init["project"]

    @property
    def version(self) -> str | None:
        """The id of the run; None if it was not given and the run is not started."""
        return self._experiment.id if self._experiment is not None else self._id

    @property
    def save_dir(self) -> str | None:
        return self._wandb_init["dir"]

    def watch(self, model: nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """``wandb.Run.watch``: records gradients or parameters of ``model`` by hooks."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.experiment.config.update(json_values(call_callables(as_dict(params))), allow_val_change=True)

    @rank_zero_only
    def log_metrics(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, metrics: Mapping[str, Any], step: int | None = None
    ) -> None:
        values = add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR)
        if step is not None and not self._wandb_init.get("sync_tensorboard"):
            values[_STEP] = step
        self.experiment.log(values)

    # -- media ---------------------------------------------------------------------------------------------------------

    @rank_zero_only
    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs a table from ``columns`` and rows ``data``, or from a pandas ``dataframe``."""
        wandb = _wandb()
        self.log_metrics({key: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step)

    @rank_zero_only
    def log_text(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[str]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs a table of texts."""
        self.log_table(key, columns, data, dataframe, step)

    @rank_zero_only
    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs images: tensors, arrays, PIL images, paths; each of ``kwargs`` (``caption``, ``masks``, ...) has one value per
        image."""
        self._log_media("Image", key, "images", images, step, kwargs)

    @rank_zero_only
    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs sounds: arrays or paths; each of ``kwargs`` (``caption``, ``sample_rate``, ...) has one value per sound."""
        self._log_media("Audio", key, "audios", audios, step, kwargs)

    @rank_zero_only
    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs videos: arrays or paths; each of ``kwargs`` (``caption``, ``fps``, ...) has one value per video."""
        self._log_media("Video", key, "videos", videos, step, kwargs)

    def _log_media(
        self, kind: str, key: str, argument: str, items: list[Any], step: int | None, options: dict[str, list[Any]]
    ) -> None:
        wandb = _wandb()
        if not isinstance(items, list):
            raise TypeError(f"WandbLogger.log_{kind.lower()}: expected a list as {argument!r}, found {type(items).__name__}.")
        for name, values in options.items():
            if len(values) != len(items):
                raise ValueError(
                    f"WandbLogger.log_{kind.lower()}: {name!r} needs one value for each of the {len(items)} {argument}, found"
                    f" {len(values)}."
                )
        media = getattr(wandb, kind)
        each = ({name: values[index] for name, values in options.items()} for index in range(len(items)))
        self.log_metrics({key: [media(item, **option) for item, option in zip(items, each, strict=True)]}, step)

    # -- artifacts -----------------------------------------------------------------------------------------------------

    @staticmethod
    @rank_zero_only
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool | None = True,
    ) -> str:
        """Downloads an artifact into ``save_dir`` and gives its path; ``use_artifact`` notes in the current run that it was
        used."""
        wandb = _wandb()
        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        return found.download(root=None if save_dir is None else os.fspath(save_dir))

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Notes that the run uses an artifact, and gives it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        if not self._log_model:
            return
        self._checkpoint_callbacks[id(checkpoint_callback)] = checkpoint_callback
        if self._log_model == "all" or checkpoint_callback.save_top_k == -1:
            self._log_checkpoints(checkpoint_callback)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        # A run that failed may have left checkpoints that nobody wants.
        if status == "success" and self._experiment is not None:
            for callback in self._checkpoint_callbacks.values():
                self._log_checkpoints(callback)

    def _log_checkpoints(self, callback: ModelCheckpoint) -> None:
        for checkpoint in scan_checkpoints(callback, self._logged_checkpoints):
            self._log_checkpoint(checkpoint, callback)
            self._logged_checkpoints[checkpoint.path] = checkpoint.saved_at

    def _log_checkpoint(self, checkpoint: SavedCheckpoint, callback: ModelCheckpoint) -> None:
        wandb = _wandb()
        self._checkpoint_name = self._checkpoint_name or f"model-{self.experiment.id}"
        options = {name: getattr(callback, name) for name in _CHECKPOINT_OPTIONS if hasattr(callback, name)}
        metadata = {
            "score": checkpoint.score,
            "original_filename": Path(checkpoint.path).name,
            callback.__class__.__name__: options,  # not `type(callback)`: it may be a weak proxy
        }
        artifact = wandb.Artifact(name=self._checkpoint_name, type="model", metadata=metadata)
        add = artifact.add_dir if os.path.isdir(checkpoint.path) else artifact.add_file
        add(checkpoint.path, name="model.ckpt", policy=self.add_file_policy)
        aliases = ["latest", "best"] if checkpoint.path == callback.best_model_path else ["latest"]
        self.experiment.log_artifact(artifact, aliases=aliases)
