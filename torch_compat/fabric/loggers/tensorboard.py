"""Event files for TensorBoard. API: ``lightning.fabric.loggers.TensorBoardLogger``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_compat import loggers
from torch_compat.core.export import _scripting
from torch_compat.fabric.wrappers import unwrap
from torch_compat.loggers.versioned import RootDirectory
from torch_compat.utilities.rank_zero import rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from torch.nn import Module


class TensorBoardLogger(RootDirectory, loggers.TensorBoardLogger):
    """Logs to event files in ``<root_dir>/<name>/version_<n>[/<sub_dir>]``; hyperparameters too, and to no other file.

    Args:
        root_dir: directory that holds all experiments.
        name: experiment name; None or "" puts the versions directly into ``root_dir``.
        version: a number for ``version_<n>``, a string for a directory of that name, None for the next free number.
        default_hp_metric: show hyperparameters that were logged without metrics with a metric ``hp_metric`` of -1.
        prefix: put before every metric's key, followed by "-".
        sub_dir: directory below the version's.
        kwargs: for ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        ModuleNotFoundError: ``tensorboard`` is not installed.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root_dir, name, version, True, default_hp_metric, prefix, sub_dir, **kwargs)

    @rank_zero_only
    def log_graph(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: Module, input_array: Tensor | None = None
    ) -> None:
        """Records the graph, from ``input_array`` or else from the module's ``example_input_array``: a tensor, or a tuple."""
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        module: Any = unwrap(model)
        if example is None:
            rank_zero_warn(
                "Could not log computational graph to TensorBoard: The `model.example_input_array` attribute is not set, and "
                "no `input_array` is given."
            )
        elif not isinstance(example, Tensor | tuple):
            rank_zero_warn(
                "Could not log computational graph to TensorBoard: The `input_array` (or `model.example_input_array`) is a "
                f"{type(example)}: give a tensor, or a tuple of the arguments of `forward`."
            )
        elif callable(getattr(module, "_apply_batch_transfer_handler", None)):  # a LightningModule
            example = module._apply_batch_transfer_handler(module._on_before_batch_transfer(example))
            with _scripting(module):
                self.experiment.add_graph(module, example)
        else:
            self.experiment.add_graph(module, example)

    @rank_zero_only
    def save(self) -> None:
        self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._experiment is not None:
            self._experiment.flush()
            self._experiment.close()
