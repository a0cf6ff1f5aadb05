"""The update of automatic optimization: its plan, which follows the settings of clipping, and its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torch_compat.step.host.host_values import HostValues
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.optimizers.host_actions import HostPlan
from torch_compat.step.update.plan import UpdatePlan

_NO_OPTIONS = np.zeros(0, np.float32)


class PlannedUpdate:
    """The update that the programs of ``steps`` make.

    Args:
        steps: the compiled executor.
        optimizer: in pure form; None: nothing is updated.
        plan: makes the plan whose clipping has this algorithm (None: none in the program).
    """

    def __init__(
        self, steps: MeshStepRunner, optimizer: FunctionalOptimizer | None, plan: Callable[[str | None], UpdatePlan]
    ) -> None:
        self._steps, self._optimizer, self._make = steps, optimizer, plan
        self._clip_value = 0.0
        self._options: np.ndarray | None = None
        self._on_mesh: Any = None
        steps.programs.set_plan(plan(None))

    def follow(self, clip_value: float, algorithm: str | None) -> None:
        """Go by the clipping of this moment: a callback may change it, and the next step goes by it.

        Args:
            clip_value: a number, 0 for none.
            algorithm: ``"norm"`` or ``"value"``; None: the program does not clip.
        """
        clips_by = algorithm if clip_value > 0 else None
        if clip_value != self._clip_value:
            self._clip_value, self._options = clip_value, None
        if clips_by != self._steps.programs.plan.clips_by:
            self._steps.programs.set_plan(self._make(clips_by))

    def carry_out(self, plan: HostPlan, host_values: HostValues, *, undoable: bool) -> Callable[[], None] | None:
        """Do on the host what a step's Python does to options and schedulers; gives what undoes it, where that is wanted.

        It comes before the update, as in stock, whose optimizers call the step as their closure.
        """
        optimizers = () if self._optimizer is None else (self._optimizer,)
        undo = plan.undo(optimizers) if undoable else None
        for one in optimizers:
            one.mark_stepped()
        plan.run(host_values, optimizers)
        return undo

    def numbers(self) -> tuple[Any, Any]:
        """The numeric options and the clip value, kept on the mesh while they do not change; what else a program depends on."""
        options, static = (_NO_OPTIONS, None) if self._optimizer is None else self._optimizer.options()
        if options is not self._options:
            self._options = options
            values = (options, np.float64(self._clip_value)) if self._clip_value else (options,)
            self._on_mesh = self._steps.model.replicate(values)
        clips_by = self._steps.programs.plan.clips_by
        return self._on_mesh, static if clips_by is None else (static, clips_by)
