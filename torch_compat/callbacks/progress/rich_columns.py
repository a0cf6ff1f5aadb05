"""The columns of a ``RichProgressBar`` that rich does not have."""

from __future__ import annotations

from datetime import timedelta

from rich.progress import ProgressColumn, Task
from rich.style import Style
from rich.text import Text


class CustomTimeColumn(ProgressColumn):
    """Elapsed and remaining time: "0:00:12 • 0:01:30"."""

    max_refresh = 0.5  # seconds; numbers that change faster cannot be read

    def __init__(self, style: str | Style) -> None:
        self.style = style
        super().__init__()

    def render(self, task: Task) -> Text:
        elapsed = task.finished_time if task.finished else task.elapsed
        return Text(f"{_clock(elapsed)} • {_clock(task.time_remaining)}", style=self.style)


class BatchesProcessedColumn(ProgressColumn):
    """Batches done of all: "10/50", or "10/--" of an unknown number."""

    def __init__(self, style: str | Style) -> None:
        self.style = style
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(f"{int(task.completed)}/{'--' if task.total is None else int(task.total)}", style=self.style)


class ProcessingSpeedColumn(ProgressColumn):
    """Steps per second: "12.34it/s"."""

    def __init__(self, style: str | Style) -> None:
        self.style = style
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:>.2f}it/s", style=self.style)


class MetricsTextColumn(ProgressColumn):
    """The text in the task's field ``metrics``, without markup: a metric's name may hold brackets."""

    def __init__(self, style: str | Style) -> None:
        self.style = style
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("metrics", ""), justify="left", style=self.style)


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
