"""Steps from the signs of gradients alone: ``torch.optim.Rprop``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.rule import Numbers, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class Rprop(UpdateRule):
    r"""Resilient backpropagation: the size of an element's step grows by ``η⁺`` while its gradient keeps its sign.

    Where the sign turns, the size shrinks by ``η⁻`` and the element stays where it is for one step.

    State: ``step``, ``prev`` (the last gradient), ``step_size`` (from ``lr`` as it is at the first gradient).
    Reference: Riedmiller and Braun, https://doi.org/10.1109/ICNN.1993.298623.
    """

    OPTIONS = ("lr", "etas", "step_sizes", "maximize")
    NUMBERS = numbers_of("lr eta_minus eta_plus step_size_min step_size_max")
    ZEROS = ("prev", "step_size")  # step_size is set at the first gradient, from the learning rate of then

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        agreement = grad * state["prev"]
        factor = jnp.where(agreement > 0, n.eta_plus, jnp.where(agreement < 0, n.eta_minus, 1))
        step_size = jnp.where(state["step"] == 0, n.lr, state["step_size"])
        step_size = jnp.clip(step_size * factor, n.step_size_min, n.step_size_max)
        grad = jnp.where(factor == n.eta_minus, 0, grad)
        return param - jnp.sign(grad) * step_size, {"step": state["step"] + 1, "prev": grad, "step_size": step_size}
