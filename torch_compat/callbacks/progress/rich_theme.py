"""``RichProgressBarTheme``: the styles of a ``RichProgressBar``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.style import Style


@dataclass
class RichProgressBarTheme:
    """Styles of the parts of a bar (https://rich.readthedocs.io/en/stable/style.html), and how metrics are written.

    Args:
        description: "Epoch 0/9", "Testing", ...
        progress_bar: the part that is done.
        progress_bar_finished: the whole bar, when done.
        progress_bar_pulse: the bar of a dataset of unknown length.
        batch_progress: "10/50".
        time: elapsed and remaining time.
        processing_speed: steps per second.
        metrics: names and values of metrics.
        metrics_text_delimiter: between two metrics.
        metrics_format: format of a metric's value.
    """

    description: str | Style = ""
    progress_bar: str | Style = "#6206E0"
    progress_bar_finished: str | Style = "#6206E0"
    progress_bar_pulse: str | Style = "#6206E0"
    batch_progress: str | Style = ""
    time: str | Style = "dim"
    processing_speed: str | Style = "dim underline"
    metrics: str | Style = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"
