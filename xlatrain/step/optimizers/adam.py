"""Adam and AdamW: ``torch.optim.Adam``, ``torch.optim.AdamW``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import bias_correction, moving_average, with_decay
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class Adam(UpdateRule):
    r"""``m ← β₁ m + (1 - β₁) g``, ``v ← β₂ v + (1 - β₂) g²``, ``θ ← θ - γ m̂ / (√v̂ + ε)``, hats for bias correction.

    State: ``step``, ``exp_avg``, ``exp_avg_sq`` and, for AMSGrad, ``max_exp_avg_sq``. References: Kingma and Ba (Adam),
    https://arxiv.org/abs/1412.6980; Loshchilov and Hutter (decoupled decay), https://arxiv.org/abs/1711.05101;
    Reddi, Kale and Kumar (AMSGrad), https://arxiv.org/abs/1904.09237.
    """

    OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
    NUMBERS = numbers_of("lr beta1 one_minus_beta1 log_beta1 beta2 one_minus_beta2 log_beta2 eps weight_decay decay_factor")
    ZEROS = ("exp_avg", "exp_avg_sq")

    amsgrad: bool = False
    decoupled_weight_decay: bool = False

    def init(self, param: jax.Array, options: Options) -> State:
        state = super().init(param, options)
        return {**state, "max_exp_avg_sq": jnp.zeros_like(param)} if self.amsgrad else state

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
