"""Adam with an infinity norm: ``torch.optim.Adamax``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import bias_correction, moving_average, with_l2
from xlatrain.step.optimizers.rule import Numbers, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class Adamax(UpdateRule):
    r"""``m ← β₁ m + (1 - β₁) g``, ``u ← max(β₂ u, |g| + ε)``, ``θ ← θ - γ / (1 - β₁ᵗ) · m / u``.

    State: ``step``, ``exp_avg``, ``exp_inf``. Reference: Kingma and Ba, https://arxiv.org/abs/1412.6980, section 7.1.
    """

    OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize")
    NUMBERS = numbers_of("lr beta1 one_minus_beta1 log_beta1 beta2 eps weight_decay")
    ZEROS = ("exp_avg", "exp_inf")

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
