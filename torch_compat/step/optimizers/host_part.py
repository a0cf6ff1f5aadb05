"""The host's part of steps that run their optimizers themselves: their actions, and the options that their programs take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torch_compat.step.host.host_values import HostValues
from torch_compat.step.optimizers.host_actions import HostPlan
from torch_compat.step.optimizers.optimizer_set import OptimizerSet


class HostPart:
    """The host's part of the steps of one loop.

    Args:
        optimizers: all of the run.
        replicate: puts a vector on every device of the mesh.
    """

    def __init__(self, optimizers: OptimizerSet, replicate: Callable[[np.ndarray], Any]) -> None:
        self.optimizers = optimizers
        self._replicate = replicate
        self._vectors: list[tuple[np.ndarray, Any]] = []  # by position: the options of an optimizer step, and their copy there
        self._undo: Callable[[], None] | None = None

    def begin(self) -> None:
        """Begin a step: what those before did stays."""
        self._undo = None

    def run(self, plan: HostPlan, host_values: HostValues, *, undoable: bool) -> list[Any]:
        """Carry out the plan of a step; gives the options of its optimizer steps, on the mesh.

        Args:
            plan: of the captured step.
            host_values: the step's; actions add to them.
            undoable: it may have to be undone.
        """
        optimizers = self.optimizers.optimizers
        if undoable and plan.changes_options:
            self._undo = plan.undo(optimizers)
        vectors = plan.run(host_values, optimizers)
        for position, vector in enumerate(vectors):  # the copies of those that did not change are kept
            if position == len(self._vectors):
                self._vectors.append((vector, self._replicate(vector)))
            elif self._vectors[position][0] is not vector:
                self._vectors[position] = (vector, self._replicate(vector))
        return [placed for _, placed in self._vectors[: len(vectors)]]

    def undo(self) -> None:
        """Undo what the step did, if it may have to be."""
        if self._undo is not None:
            self._undo()
            self._undo = None
