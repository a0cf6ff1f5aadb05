"""The update of a ``torch.optim`` optimizer at one moment, without the optimizer: what a program may be made from and keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from xlatrain.step.optimizers.rule import State, UpdateRule, apply_rule
from xlatrain.step.stacking import StackKey, members

Params = Mapping[str, jax.Array]
Gradients = Mapping[str, jax.Array | None]
OptimizerState = dict[str, State]


@dataclass(frozen=True)
class FrozenGroup:
    """A param group.

    Attributes:
        rule: its flags are the group's.
        names: of its parameters.
        count: of the rule's numbers.
        initial: the options from which a state is made, and their values.
    """

    rule: UpdateRule
    names: tuple[str, ...]
    count: int
    initial: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class FrozenUpdate:
    """An update. Equal ones make equal programs; it holds no tensor and nothing of the user's.

    Attributes:
        groups: in the optimizer's order.
    """

    groups: tuple[FrozenGroup, ...]

    def members(self) -> set[str]:
        """The names of the parameters in its groups."""
        return {name for group in self.groups for name in group.names}

    def update(
        self, grads: Gradients, opt_state: OptimizerState, params: Params, hyper: jax.Array
    ) -> tuple[dict[str, jax.Array], OptimizerState]:
        """Take a step, see :meth:`~torch_compat.step.optimizers.functional_optimizer.FunctionalOptimizer.update`. Pure."""
        new_params, new_state = dict(params), dict(opt_state)
        keys = {path: key for key in params for path in members(key)}
        offset = 0
        for group in self.groups:
            numbers = group.rule.NUMBERS(*(hyper[offset + i] for i in range(group.count)))
            offset += group.count
            for key in dict.fromkeys(keys.get(name, name) for name in group.names):
                grad = grads.get(key)
                if grad is None:
                    continue
                init, update = partial(_init, group), partial(_update, group.rule, numbers)
                if isinstance(key, StackKey):  # layer by layer: the same numbers as if they were not stacked
                    init, update = jax.vmap(init), jax.vmap(update)
                state = new_state[key] if key in new_state else init(params[key])
                new_params[key], new_state[key] = update(grad, state, params[key])
        return new_params, new_state


@dataclass(frozen=True)
class FrozenInit:
    """The states before the first step. Equal ones make equal programs; it holds no tensor and nothing of the user's.

    Attributes:
        groups: with the names of the parameters that have a state.
    """

    groups: tuple[FrozenGroup, ...]

    def __call__(self, params: Params) -> OptimizerState:
        """See :meth:`~torch_compat.step.optimizers.functional_optimizer.FunctionalOptimizer.init`. Pure."""
        return {name: _init(group, params[name]) for group in self.groups for name in group.names if name in params}


def _init(group: FrozenGroup, param: jax.Array) -> State:
    return group.rule.init(param, dict(group.initial))


def _update(rule: UpdateRule, numbers: Any, grad: jax.Array, state: State, param: jax.Array) -> tuple[jax.Array, State]:
    return apply_rule(rule, grad, state, param, numbers)
