"""``SimpleProfiler``: mean and total duration of each action."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from torch_compat.profilers.profiler import Profiler


class SimpleProfiler(Profiler):
    """Records how long each action takes on the host, and reports it in a table.

    ::

        trainer = pl.Trainer(profiler=SimpleProfiler(dirpath=".", filename="times"))

    Args:
        dirpath, filename: of the report, see ``Profiler``.
        extended: report the number of calls and the share of the total time too.

    Attributes:
        recorded_durations: action → seconds of each call.

    Raises:
        ValueError: from ``start``, an action that runs; from ``stop``, one that does not.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.profilers.SimpleProfiler.html
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath=dirpath, filename=filename)
        self.current_actions: dict[str, float] = {}
        self.recorded_durations: dict[str, list[float]] = defaultdict(list)
        self.extended = extended
        self.start_time = time.monotonic()

    def start(self, action_name: str) -> None:
        if action_name in self.current_actions:
            raise ValueError(f"Attempted to start {action_name} which has already started: call stop() first")
        self.current_actions[action_name] = time.monotonic()

    def stop(self, action_name: str) -> None:
        end = time.monotonic()
        if action_name not in self.current_actions:
            raise ValueError(
                f"Attempting to stop recording an action ({action_name}) which was never started: call start() first"
            )
        self.recorded_durations[action_name].append(end - self.current_actions.pop(action_name))

    def summary(self) -> str:
        total = time.monotonic() - self.start_time
        rows = sorted(self.recorded_durations.items(), key=lambda item: sum(item[1]), reverse=True)
        stage = f"{self._stage.upper()} " if self._stage is not None else ""
        if not self.extended:
            lines = [(action, f"{sum(d) / len(d):.5}", f"{sum(d):.5}") for action, d in rows]
            header = ("Action", "Mean duration (s)", "Total time (s)")
        else:
            calls = sum(len(durations) for _, durations in rows)
            lines = [("Total", "-", str(calls), f"{total:.5}", "100 %")]
            lines += [
                (action, f"{sum(d) / len(d):.5}", str(len(d)), f"{sum(d):.5}", f"{100 * sum(d) / total:.5}") for action, d in rows
            ]
            header = ("Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")
        return f"\n{stage}Profiler Report\n{_table(header, lines)}\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    rule = "-" * (sum(widths) + 3 * len(widths) + 1)
    lines = ["".join(f"|  {cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + "|" for row in (header, *rows)]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])
