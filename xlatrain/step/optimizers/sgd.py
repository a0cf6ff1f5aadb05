"""Stochastic gradient descent with momentum: ``torch.optim.SGD``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import new_step, number, with_l2
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class SGD(UpdateRule):
    r"""``b ← μ b + (1 - τ) g``, first ``b ← g``; ``θ ← θ - γ b`` (nesterov: ``θ - γ (g + μ b)``).

    State: ``momentum_buffer`` (shape of the parameter) where momentum is not zero, and a ``step`` that tells the first
    update, which torch tells by the buffer's absence. Reference: https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html
    """

    OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    NUMBERS = numbers_of("lr momentum one_minus_dampening weight_decay")
    HIDDEN = ("step",)

    nesterov: bool = False
    has_momentum: bool = False

    @classmethod
    def from_options(cls, options: Options) -> SGD:
        return cls(
            maximize=bool(options.get("maximize", False)),
            nesterov=bool(options.get("nesterov", False)),
            has_momentum=number(options.get("momentum", 0)) != 0,
        )

    def number(self, name: str, options: Options) -> float:
        return super().number(name, {"momentum": 0, "dampening": 0, "weight_decay": 0, **options})

    def init(self, param: jax.Array, options: Options) -> State:
        return {"momentum_buffer": jnp.zeros_like(param), "step": new_step()} if self.has_momentum else {}

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        grad = with_l2(grad, param, numbers.weight_decay)
        if not self.has_momentum:
            return param - numbers.lr * grad, state
        if "momentum_buffer" in state:
            later = numbers.momentum * state["momentum_buffer"] + numbers.one_minus_dampening * grad
            buffer, step = jnp.where(state["step"] == 0, grad, later), state["step"]
        else:  # momentum was zero until now: torch makes the buffer here
            buffer, step = grad, new_step()
        direction = grad + numbers.momentum * buffer if self.nesterov else buffer
        return param - numbers.lr * direction, {"momentum_buffer": buffer, "step": step + 1}
