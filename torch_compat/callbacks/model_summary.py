"""``ModelSummary``: prints the table of a module's layers before training."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.model_summary import ModelSummary as Summary
from torch_compat.utilities.model_summary import format_summary_table, summarize
from torch_compat.utilities.rank_zero import LOGGER_NAME

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

log = logging.getLogger(f"{LOGGER_NAME}.callbacks.model_summary")


class ModelSummary(Callback):
    """Reports layers, parameters, modes and, with an ``example_input_array``, sizes and FLOPs, when ``fit`` starts.

    Sizes are those of whole parameters, however they are sharded.

    Args:
        max_depth: how many levels of nested layers to list; -1 all, 0 no summary.
        summarize_kwargs: for ``summarize``, in subclasses that take more.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.ModelSummary.html
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        self._max_depth = max_depth
        self._summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._max_depth:
            return
        summary = self._summary(trainer, pl_module)  # on every process: the example input's forward may be collective
        data = summary._get_summary_data()
        if trainer.is_global_zero:
            self.summarize(
                data,
                summary.total_parameters,
                summary.trainable_parameters,
                summary.model_size,
                summary.total_training_modes,
                total_flops=summary.total_flops,
                **self._summarize_kwargs,
            )

    def _summary(self, trainer: Trainer, pl_module: LightningModule) -> Summary:
        return summarize(pl_module, max_depth=self._max_depth)

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Reports the summary; override it to report elsewhere.

        Args:
            summary_data: header and cells of each column.
            total_parameters: number of parameters.
            trainable_parameters: number of those that require gradients.
            model_size: in MB.
            total_training_modes: number of modules in mode "train" and "eval".
            total_flops: of one forward of the example input.
            summarize_kwargs: those of the callback.
        """
        table = format_summary_table(
            total_parameters, trainable_parameters, model_size, total_training_modes, total_flops, *summary_data
        )
        log.info("\n" + table)
