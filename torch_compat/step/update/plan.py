"""The update of a training step with one optimizer, inside its program: a pure function of a frozen plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch_compat.step.optimizers.frozen_update import FrozenUpdate
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from xlatrain.step import clipping
from xlatrain.step.finite import FiniteGuard
from xlatrain.step.loss_scale import LossScaler
from xlatrain.step.offload import update_from_host
from xlatrain.step.stacking import members


@dataclass(frozen=True)
class UpdatePlan:
    """The parts of an update that its program is made for; numbers (options of the optimizer, the clip value) are its inputs.

    Attributes:
        optimizer: in pure form; None: nothing is updated.
        clips_by: the algorithm of the clipping in the program, ``"norm"`` or ``"value"``; None: gradients are not clipped there.
        offloads: whether the optimizer's state is in the memory of the host.
        scaler: loss scaling, or None.
        guard: a check of whether gradients are finite, or None.
    """

    optimizer: FunctionalOptimizer | FrozenUpdate | None
    clips_by: str | None = None
    offloads: bool = False
    scaler: LossScaler | None = None
    guard: FiniteGuard | None = None

    def frozen(self) -> UpdatePlan:
        """The plan of a program: with the optimizer's rules as they are now, where it has such, in place of the optimizer."""
        frozen = self.optimizer.frozen() if isinstance(self.optimizer, FunctionalOptimizer) else None
        return self if frozen is None else dataclasses.replace(self, optimizer=frozen)

    @property
    def key(self) -> Hashable | None:
        """All of the update that a program is made from; None where it cannot be said, or is more than this."""
        plan = self.frozen()
        if self.guard is not None or isinstance(plan.optimizer, FunctionalOptimizer):
            return None
        return (plan.optimizer, self.clips_by, self.offloads, self.scaler)

    def stackable(self, names: Sequence[str], opt_state: Any) -> bool:
        """Whether :func:`update` takes parameters of these names as one stack (:mod:`xlatrain.step.stacking`)."""
        return isinstance(self.optimizer, FunctionalOptimizer) and self.optimizer.stackable(names, opt_state)


def update(plan: UpdatePlan, grads: Any, opt_state: Any, params: Any, hyper: Any) -> tuple[Any, Any, Any]:
    """Clip and step, with loss scaling and the check of gradients around it in :class:`xlatrain.step.step.StepBuilder`.

    Args:
        plan: the update.
        grads: name → array of the parameter's shape and dtype, or None.
        opt_state: of the optimizer.
        params: name → array.
        hyper: ``(options,)`` or ``(options, clip value)``: float32[n] (float64 where a parameter is) and
            float32[] (float64 in a run of 64 bits).

    Returns:
        Parameters and optimizer state of the same shapes and dtypes, and nothing else.
    """
    options, *clip_value = hyper
    if plan.optimizer is not None:
        held = plan.optimizer.members()  # one that is in no group is not clipped, and no part of the norm
        grads = {name: grad for name, grad in grads.items() if not held.isdisjoint(members(name))}
    if plan.clips_by == "norm":
        grads, _ = clipping.clip_by_norm(grads, *clip_value)
    elif plan.clips_by is not None:
        grads = clipping.clip_by_value(grads, *clip_value)
    if plan.optimizer is None:
        return dict(params), opt_state, ()
    step = functools.partial(plan.optimizer.update, hyper=options)
    run = functools.partial(update_from_host, step) if plan.offloads else step
    params, opt_state = run(grads, opt_state, params)
    return params, opt_state, ()
