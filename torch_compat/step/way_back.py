"""The way back to compiled steps, where only the first steps of a run could not be compiled.

A codebook that numpy initializes from the first batch, a scale that is measured there: what cannot be compiled happens once.
"""

from __future__ import annotations

import contextlib
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch

from torch_compat.run.report import ExecutorLog
from torch_compat.step.eager.fallback import uninitialized
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.utilities.rank_zero import rank_zero_info
from xlatrain.bridge.errors import BridgeError

_MOST = 3
_BETWEEN = 100
"""Ways back in a run: so many, and one more for so many steps."""
_NAME = "the first training_step"


class WayBack(ABC):
    """The way back from eager steps.

    Attributes:
        is_open: whether steps may be compiled again.
        steps: the compiled steps so far; None where there were none.
        streams: their random streams.
    """

    is_open = False
    steps: MeshStepRunner | None = None
    streams: dict[str, Any] | None = None

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @abstractmethod
    def watching(self, stepped: bool) -> AbstractContextManager[None]:
        """An eager step, after which the way back is open or not; open only where no gradients wait for others (``stepped``)."""

    def note(self, log: ExecutorLog, count: int) -> None:
        """Steps are compiled again after ``count`` eager ones: say so."""
        log.steps += count
        log.on_host[_NAME] = self._reason


class OnceInitialized(WayBack):
    """The way back from steps that began eagerly since the first batch makes parameters.

    Args:
        module: the module.
        reason: why steps began so.
    """

    def __init__(self, module: torch.nn.Module, reason: str) -> None:
        super().__init__(reason)
        self._module = module

    @contextlib.contextmanager
    def watching(self, stepped: bool) -> Iterator[None]:
        yield
        self.is_open = stepped and uninitialized(self._module) is None


class AfterOneStep(WayBack):
    """The way back from a step that does what cannot be compiled, where the next step does not.

    Args:
        error: of the step.
        steps: the compiled steps so far.
        streams: their random streams.
    """

    def __init__(self, error: BridgeError, steps: MeshStepRunner, streams: dict[str, Any]) -> None:
        super().__init__(str(error))
        self.steps: MeshStepRunner = steps
        self.streams = streams

    @contextlib.contextmanager
    def watching(self, stepped: bool) -> Iterator[None]:
        yield
        self.is_open = stepped

    def note(self, log: ExecutorLog, count: int) -> None:
        super().note(log, count)
        self.steps.ways_back += 1


class PastTheLine(WayBack):
    """The way back that is open once a step has not come to the line for which none could be compiled.

    Args:
        reason: why not.
        place: the file of the line, and its number.
        steps: the compiled steps so far.
        streams: their random streams.
    """

    def __init__(self, reason: str, place: tuple[str, int], steps: MeshStepRunner, streams: dict[str, Any]) -> None:
        super().__init__(reason)
        self._place = place
        self.steps: MeshStepRunner = steps
        self.streams = streams
        self._is_closed = False
        self._reached = False

    @contextlib.contextmanager
    def watching(self, stepped: bool) -> Iterator[None]:
        """An eager step, after which the way back is open or closed for good.

        What follows Python line by line, a debugger or a measurement of coverage, is left alone: the way stays closed.
        """
        if self._is_closed or sys.gettrace() is not None:
            self._is_closed = True
            yield
            return
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
        self._is_closed = self._reached
        self.is_open = stepped and not self._reached

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._followed if frame.f_code.co_filename == self._place[0] else None

    def _followed(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_lineno == self._place[1]:
            self._reached = True
        return self._followed

    def note(self, log: ExecutorLog, count: int) -> None:
        super().note(log, count)
        self.steps.ways_back += 1
        rank_zero_info(f"Steps are compiled from here on: the last one did not come to {self._place[0]}:{self._place[1]}")


def way_back(error: BridgeError, steps: MeshStepRunner, streams: dict[str, Any]) -> WayBack | None:
    """The way back after an error of a step; None where it names no line, or there were too many before.

    Args:
        error: for which a step could not be compiled.
        steps: the compiled steps so far.
        streams: their random streams.
    """
    if steps.ways_back >= _MOST + steps.log.steps // _BETWEEN:
        return None
    if error.once:
        return AfterOneStep(error, steps, streams)
    found = re.match(r"(.+?):(\d+): ", str(error))
    return None if found is None else PastTheLine(str(error), (found[1], int(found[2])), steps, streams)
