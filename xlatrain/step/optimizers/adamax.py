"""Adam with an infinity norm: ``torch.optim.Adamax``."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import bias_correction, log, moving_average, new_step, number, with_l2
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule


class AdamaxNumbers(NamedTuple):
    """Option values of :class:`Adamax`, and what is derived of them: Python floats on the host, scalars in the program."""

    lr: float
    beta1: float
    one_minus_beta1: float
    log_beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclasses.dataclass(frozen=True)
class Adamax(UpdateRule):
    r"""``m ← β₁ m + (1 - β₁) g``, ``u ← max(β₂ u, |g| + ε)``, ``θ ← θ - γ / (1 - β₁ᵗ) · m / u``.

    State: ``step``, ``exp_avg``, ``exp_inf``. Reference: Kingma and Ba, https://arxiv.org/abs/1412.6980, section 7.1.
    """

    OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize")
    NUMBERS = AdamaxNumbers

    def numbers(self, options: Options) -> Numbers:
        beta1, beta2 = map(number, options["betas"])
        return AdamaxNumbers(
            number(options["lr"]), beta1, 1 - beta1, log(beta1), beta2, number(options["eps"]), number(options["weight_decay"])
        )

    def init(self, param: jax.Array, options: Options) -> State:
        return {"step": new_step(), "exp_avg": jnp.zeros_like(param), "exp_inf": jnp.zeros_like(param)}

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        step = state["step"] + 1
        grad = with_l2(grad, param, n.weight_decay)
        exp_avg = moving_average(state["exp_avg"], grad, n.beta1, n.one_minus_beta1)
        exp_inf = jnp.maximum(n.beta2 * state["exp_inf"], jnp.abs(grad) + n.eps)
        param = param - n.lr / bias_correction(n.log_beta1, step) * (exp_avg / exp_inf)
        return param, {"step": step, "exp_avg": exp_avg, "exp_inf": exp_inf}
