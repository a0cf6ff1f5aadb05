"""``AdvancedProfiler``: Python's cProfile for each action."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
from pathlib import Path

from torch_compat.profilers.profiler import Profiler
from torch_compat.utilities.cloud_io import get_filesystem


class AdvancedProfiler(Profiler):
    """Records the function calls of each action with cProfile. Calls of an action inside another one count for the inner only.

    Args:
        dirpath, filename: of the report, see ``Profiler``.
        line_count_restriction: how much of each table is reported: a number of lines, or a fraction.
        dump_stats: also write ``<stage>-<filename>-<process>-<action>.prof`` files, for pstats and its viewers.

    Attributes:
        profiled_actions: action → its ``cProfile.Profile``.

    Raises:
        ValueError: from ``stop``, an action that does not run.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.profilers.AdvancedProfiler.html
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath=dirpath, filename=filename)
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self._running: list[str] = []  # the last one is enabled: only one profile can be at a time

    def start(self, action_name: str) -> None:
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        if action_name not in self._running:
            raise ValueError(
                f"Attempting to stop recording an action ({action_name}) which was never started: call start() first"
            )
        self.profiled_actions[self._running[-1]].disable()
        self._running.reverse()
        self._running.remove(action_name)  # the innermost one of that name
        self._running.reverse()
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        stage = f"{self._stage.upper()} " if self._stage is not None else ""
        tables = [f"{stage}Profiler Report"]
        for action, profile in self.profiled_actions.items():
            text = io.StringIO()
            pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative").print_stats(self.line_count_restriction)
            tables.append(f"Profile stats for: {action}\n{text.getvalue()}")
            if self.dump_stats:
                self._dump(action, profile)
        return "\n".join(tables)

    def _dump(self, action: str, profile: cProfile.Profile) -> None:
        assert self.dirpath is not None, "there is a directory once a run has started"
        safe = "".join(character if character.isalnum() or character in "._-" else "_" for character in action)
        path = os.path.join(self.dirpath, self._prepare_filename(action_name=safe, extension=".prof"))
        get_filesystem(path).makedirs(os.fspath(self.dirpath), exist_ok=True)
        profile.dump_stats(path)

    def teardown(self, stage: str | None) -> None:
        super().teardown(stage)
        self.profiled_actions.clear()
        self._running.clear()
