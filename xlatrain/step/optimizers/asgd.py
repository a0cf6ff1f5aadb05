"""Averaged stochastic gradient descent: ``torch.optim.ASGD``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import new_step, with_l2
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class ASGD(UpdateRule):
    r"""``θ ← (1 - λ η) θ - η g`` with ``η = γ / (1 + λ γ t)^α``, and an average of the iterates from step ``t0`` on.

    State: ``step``, ``eta`` (the next step's rate), ``mu`` (the next iterate's weight in the average), ``ax`` (the average).
    Reference: Polyak and Juditsky, https://doi.org/10.1137/0330046.
    """

    OPTIONS = ("lr", "lambd", "alpha", "t0", "weight_decay", "maximize")
    NUMBERS = numbers_of("lr lambd alpha t0 weight_decay")
    ZEROS = ("ax",)
    SCALARS = ("step", "eta", "mu")

    def init(self, param: jax.Array, options: Options) -> State:
        # eta is set at the first gradient, from the learning rate of then
        scalars = {"step": new_step(), "eta": jnp.zeros((), jnp.float32), "mu": jnp.ones((), jnp.float32)}
        return {**scalars, **super().init(param, options)}  # in torch's order

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        step, mu = state["step"] + 1, state["mu"]
        eta = jnp.where(state["step"] == 0, n.lr, state["eta"])
        grad = with_l2(grad, param, n.weight_decay)
        param = param * (1 - n.lambd * eta) - eta * grad
        average = jnp.where(mu == 1, param, state["ax"] + (param - state["ax"]) * mu)
        next_eta = n.lr / jnp.power(1 + n.lambd * n.lr * step, n.alpha)
        next_mu = 1 / jnp.maximum(1, step - n.t0)
        return param, {"step": step, "eta": next_eta, "mu": next_mu, "ax": average}
