"""Adam and AdamW: ``torch.optim.Adam``, ``torch.optim.AdamW``."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import bias_correction, log, moving_average, new_step, number, with_decay
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule


class AdamNumbers(NamedTuple):
    """Option values of :class:`Adam`, and what is derived of them: Python floats on the host, scalars in the program."""

    lr: float
    beta1: float
    one_minus_beta1: float
    log_beta1: float
    beta2: float
    one_minus_beta2: float
    log_beta2: float
    eps: float
    weight_decay: float
    decay_factor: float
    """``1 - lr * weight_decay``, what decoupled weight decay multiplies the parameter by."""


@dataclasses.dataclass(frozen=True)
class Adam(UpdateRule):
    r"""``m ← β₁ m + (1 - β₁) g``, ``v ← β₂ v + (1 - β₂) g²``, ``θ ← θ - γ m̂ / (√v̂ + ε)``, hats for bias correction.

    State: ``step``, ``exp_avg``, ``exp_avg_sq`` and, for AMSGrad, ``max_exp_avg_sq``. References: Kingma and Ba (Adam),
    https://arxiv.org/abs/1412.6980; Loshchilov and Hutter (decoupled decay), https://arxiv.org/abs/1711.05101;
    Reddi, Kale and Kumar (AMSGrad), https://arxiv.org/abs/1904.09237.
    """

    OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
    NUMBERS = AdamNumbers

    amsgrad: bool = False
    decoupled_weight_decay: bool = False

    def numbers(self, options: Options) -> Numbers:
        lr, weight_decay = number(options["lr"]), number(options["weight_decay"])
        beta1, beta2 = map(number, options["betas"])
        return AdamNumbers(
            lr, beta1, 1 - beta1, log(beta1), beta2, 1 - beta2, log(beta2),
            number(options["eps"]), weight_decay, 1 - lr * weight_decay,
        )  # fmt: skip

    def init(self, param: jax.Array, options: Options) -> State:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")
        return {"step": new_step(), **{name: jnp.zeros_like(param) for name in names}}

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        step = state["step"] + 1
        param, grad = with_decay(param, grad, n, self.decoupled_weight_decay)
        new = {
            "step": step,
            "exp_avg": moving_average(state["exp_avg"], grad, n.beta1, n.one_minus_beta1),
            "exp_avg_sq": moving_average(state["exp_avg_sq"], jnp.square(grad), n.beta2, n.one_minus_beta2),
        }
        second_moment = new["exp_avg_sq"]
        if self.amsgrad:
            second_moment = new["max_exp_avg_sq"] = jnp.maximum(state["max_exp_avg_sq"], second_moment)
        denominator = jnp.sqrt(second_moment) / jnp.sqrt(bias_correction(n.log_beta2, step)) + n.eps
        step_size = n.lr / bias_correction(n.log_beta1, step)
        return param - step_size * (new["exp_avg"] / denominator), {**state, **new}
