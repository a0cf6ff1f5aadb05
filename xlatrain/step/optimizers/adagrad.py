"""Rates that shrink with the gradients seen: ``torch.optim.Adagrad``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import new_step, number, with_l2
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class Adagrad(UpdateRule):
    r"""``s ← s + g²``, ``θ ← θ - γ / (1 + (t - 1) η) · g / (√s + ε)``.

    State: ``step``, ``sum`` (from ``initial_accumulator_value``). Reference: Duchi, Hazan and Singer,
    http://jmlr.org/papers/v12/duchi11a.html.
    """

    OPTIONS = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize")
    NUMBERS = numbers_of("lr lr_decay eps weight_decay")
    INITIAL = ("initial_accumulator_value",)
    EAGER = True

    def init(self, param: jax.Array, options: Options) -> State:
        start = number(options["initial_accumulator_value"])
        value = complex(start, start) if jnp.iscomplexobj(param) else start
        return {"step": new_step(), "sum": jnp.full_like(param, value)}

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        step = state["step"] + 1
        grad = with_l2(grad, param, numbers.weight_decay)
        total = state["sum"] + jnp.square(grad)
        rate = numbers.lr / (1 + (step - 1) * numbers.lr_decay)
        return param - rate * (grad / (jnp.sqrt(total) + numbers.eps)), {"step": step, "sum": total}
