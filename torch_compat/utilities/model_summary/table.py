"""The summary as text."""

from __future__ import annotations

import math

UNITS = ("", "K", "M", "B", "T")


def get_human_readable_count(number: int) -> str:
    """A count with at most three digits and a unit: ``1234`` → ``"1.2 K"``, ``123`` → ``"123  "``, up to T for 10**12."""
    if number < 0:
        raise ValueError(f"expected a count of at least 0, got {number}")
    thousands = min(int(math.log10(number)) // 3 if number else 0, len(UNITS) - 1)
    scaled = number / 1000**thousands
    if thousands == 0 or scaled >= 100:
        return f"{int(scaled):,d} {UNITS[thousands]}" if thousands else f"{number:,d}  "
    return f"{scaled:,.1f} {UNITS[thousands]}"


def get_formatted_model_size(total_model_size: float) -> str:
    """A size in MB with three decimals."""
    return f"{total_model_size:,.3f}"


def format_summary_table(
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
    *cols: tuple[str, list[str]],
) -> str:
    """The table and, below it, the totals.

    Args:
        total_parameters: their number.
        trainable_parameters: the number of those that require gradients.
        model_size: in MB.
        total_training_modes: numbers of modules in ``"train"`` and ``"eval"`` mode.
        total_flops: of one forward.
        *cols: header and cells of each column.
    """
    widths = [max(len(header), *(len(cell) for cell in cells)) if cells else len(header) for header, cells in cols]
    line = "-" * (sum(widths) + 3 * (len(cols) + 1))
    rows = zip(*(cells for _, cells in cols), strict=True)
    totals = (
        (get_human_readable_count(trainable_parameters), "Trainable params"),
        (get_human_readable_count(total_parameters - trainable_parameters), "Non-trainable params"),
        (get_human_readable_count(total_parameters), "Total params"),
        (get_formatted_model_size(model_size), "Total estimated model params size (MB)"),
        (str(total_training_modes["train"]), "Modules in train mode"),
        (str(total_training_modes["eval"]), "Modules in eval mode"),
        (get_human_readable_count(total_flops), "Total Flops"),
    )
    return "\n".join(
        [
            _row([header for header, _ in cols], widths),
            line,
            *(_row(list(row), widths) for row in rows),
            line,
            *(f"{value:<10}{label}" for value, label in totals),
        ]
    )


def _row(cells: list[str], widths: list[int]) -> str:
    return " | ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
