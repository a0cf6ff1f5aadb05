"""``CometLogger``: Comet."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from torch_compat.loggers.logger import Logger, rank_zero_experiment
from torch_compat.utilities.hyperparameters import as_dict, flatten
from torch_compat.utilities.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from torch.nn import Module


class CometLogger(Logger):
    """Logs to Comet. Process 0 starts an experiment when the logger is made; later processes attach to it by its key.

    Args:
        api_key: key of the account; default: that of ``comet login``.
        workspace: workspace; default: the account's.
        project: project; default: "Uncategorized".
        experiment_key: an experiment to log to, or the key of a new one.
        mode: "get_or_create" (Comet's default), "get" or "create".
        online: False stores the experiment locally.
        prefix: put before the metrics' names, followed by "_".
        kwargs: for ``comet_ml.ExperimentConfig``: ``name``, ``tags``, ``offline_directory``, ...

    Raises:
        ModuleNotFoundError: ``comet-ml`` is not installed.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.loggers.comet.html
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("comet_ml") is None:
            raise ModuleNotFoundError("CometLogger needs `comet-ml`, which is not installed: `pip install comet-ml`.")
        super().__init__()
        self._start_options = {"api_key": api_key, "workspace": workspace, "project": project, "mode": mode, "online": online}
        self._experiment_key = experiment_key
        self._project = project
        self._prefix = prefix
        self._config = importlib.import_module("comet_ml").ExperimentConfig(**kwargs)
        self._experiment: Any = None
        self._create_experiment()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_experiment": None}  # the process that the logger is sent to attaches by the key

    @rank_zero_only
    def _create_experiment(self) -> None:
        comet = importlib.import_module("comet_ml")
        options = {**self._start_options, "experiment_key": self._experiment_key}
        self._experiment = comet.start(experiment_config=self._config, **options)
        self._experiment_key = self._experiment.get_key()
        self._project = self._experiment.project_name
        self._experiment.log_other("Created from", "pytorch-lightning")

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``comet_ml`` experiment."""
        if self._experiment is None:
            self._create_experiment()
        return self._experiment

    @property
    def name(self) -> str | None:
        """The project."""
        return self._project

    @property
    def version(self) -> str | None:
        """The key of the experiment."""
        return self._experiment_key

    @property
    def save_dir(self) -> str | None:
        """The directory of experiments that are not online."""
        return self._config.offline_directory

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.experiment.log_parameters(flatten(as_dict(params)))

    @rank_zero_only
    def log_metrics(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, metrics: Mapping[str, Tensor | float], step: int | None = None
    ) -> None:
        values = {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in metrics.items()}
        epoch = values.pop("epoch", None)
        self.experiment.log_metrics(
            values, step=step, epoch=None if epoch is None else int(epoch), **({"prefix": self._prefix} if self._prefix else {})
        )

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Sends what is buffered; the experiment stays open, since user code may go on logging."""
        if self._experiment is not None:
            self._experiment.flush()

    @rank_zero_only
    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:
        self.experiment.set_model_graph(str(model))
