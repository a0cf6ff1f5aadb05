"""Rates from a ratio of running averages: ``torch.optim.Adadelta``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import moving_average, with_l2
from xlatrain.step.optimizers.rule import Numbers, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class Adadelta(UpdateRule):
    r"""``v ← ρ v + (1 - ρ) g²``, ``Δ = √(u + ε) / √(v + ε) · g``, ``u ← ρ u + (1 - ρ) Δ²``, ``θ ← θ - γ Δ``.

    State: ``step``, ``square_avg`` (v), ``acc_delta`` (u). Reference: Zeiler, https://arxiv.org/abs/1212.5701.
    """

    OPTIONS = ("lr", "rho", "eps", "weight_decay", "maximize")
    NUMBERS = numbers_of("lr rho one_minus_rho eps weight_decay")
    ZEROS = ("square_avg", "acc_delta")

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        grad = with_l2(grad, param, n.weight_decay)
        square_avg = moving_average(state["square_avg"], jnp.square(grad), n.rho, n.one_minus_rho)
        delta = jnp.sqrt(state["acc_delta"] + n.eps) / jnp.sqrt(square_avg + n.eps) * grad
        acc_delta = moving_average(state["acc_delta"], jnp.square(delta), n.rho, n.one_minus_rho)
        return param - n.lr * delta, {"step": state["step"] + 1, "square_avg": square_avg, "acc_delta": acc_delta}
