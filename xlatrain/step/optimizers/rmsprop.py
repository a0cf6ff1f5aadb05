"""Gradients over their running root mean square: ``torch.optim.RMSprop``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import moving_average, new_step, number, with_l2
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class RMSprop(UpdateRule):
    r"""``v ← α v + (1 - α) g²``, ``b ← μ b + g / (√v + ε)``, ``θ ← θ - γ b``; centered: ``√(v - ḡ²)`` in place of ``√v``.

    State: ``step``, ``square_avg``; ``momentum_buffer`` where momentum is positive; ``grad_avg`` where centered.
    References: Hinton, https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf; Graves (centered),
    https://arxiv.org/abs/1308.0850.
    """

    OPTIONS = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize")
    NUMBERS = numbers_of("lr alpha one_minus_alpha eps weight_decay momentum")

    centered: bool = False
    has_momentum: bool = False

    @classmethod
    def from_options(cls, options: Options) -> RMSprop:
        return cls(
            maximize=bool(options.get("maximize", False)),
            centered=bool(options.get("centered", False)),
            has_momentum=number(options.get("momentum", 0)) > 0,
        )

    def number(self, name: str, options: Options) -> float:
        return super().number(name, {"momentum": 0, **options})

    def init(self, param: jax.Array, options: Options) -> State:
        state = {"step": new_step(), "square_avg": jnp.zeros_like(param)}
        if self.has_momentum:
            state["momentum_buffer"] = jnp.zeros_like(param)
        if self.centered:
            state["grad_avg"] = jnp.zeros_like(param)
        return state

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        grad = with_l2(grad, param, n.weight_decay)
        new = {**state, "step": state["step"] + 1}
        variance = new["square_avg"] = moving_average(state["square_avg"], jnp.square(grad), n.alpha, n.one_minus_alpha)
        if self.centered:
            new["grad_avg"] = moving_average(state["grad_avg"], grad, n.alpha, n.one_minus_alpha)
            variance = variance - jnp.square(new["grad_avg"])
        direction = grad / (jnp.sqrt(variance) + n.eps)
        if self.has_momentum:
            direction = new["momentum_buffer"] = n.momentum * state["momentum_buffer"] + direction
        return param - n.lr * direction, new
