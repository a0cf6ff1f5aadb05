"""``RichModelSummary``: the table of a module's layers, drawn by rich."""

from __future__ import annotations

from typing import Any

import rich
from rich.table import Table

from torch_compat.callbacks.model_summary import ModelSummary
from torch_compat.utilities.model_summary import get_formatted_model_size, get_human_readable_count

_RIGHT = ("Params", "FLOPs", "In sizes", "Out sizes")
_STYLES = {" ": "dim", "In sizes": "white", "Out sizes": "white"}


class RichModelSummary(ModelSummary):
    """A ``ModelSummary`` printed to rich's console. ``RichProgressBar`` chooses it by default.

    Args:
        max_depth: how many levels of nested layers to list; -1 all, 0 no summary.
        summarize_kwargs: ``header_style``, a rich style, default "bold magenta".

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.RichModelSummary.html
    """

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
        table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
        for header, _ in summary_data:
            justify = "right" if header in _RIGHT else "left"
            table.add_column(header, justify=justify, style=_STYLES.get(header), no_wrap=header == "Name")
        for row in zip(*(cells for _, cells in summary_data), strict=True):
            table.add_row(*row)

        totals = {
            "Trainable params": get_human_readable_count(trainable_parameters),
            "Non-trainable params": get_human_readable_count(total_parameters - trainable_parameters),
            "Total params": get_human_readable_count(total_parameters),
            "Total estimated model params size (MB)": get_formatted_model_size(model_size),
            "Modules in train mode": str(total_training_modes["train"]),
            "Modules in eval mode": str(total_training_modes["eval"]),
            "Total FLOPs": get_human_readable_count(total_flops),
        }
        grid = Table.grid(expand=True)
        grid.add_column()
        for label, value in totals.items():
            grid.add_row(f"[bold]{label}[/]: {value}")
        console = rich.get_console()  # asked for now: somebody may have replaced it
        console.print(table)
        console.print(grid)
