"""Adam with Nesterov momentum: ``torch.optim.NAdam``."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import bias_correction, moving_average, new_step, number, with_decay
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class NAdam(UpdateRule):
    r"""Adam whose first moment looks ahead with a momentum ``μ_t = β₁ (1 - ½ 0.96^{tψ})`` that warms up.

    State: ``step``, ``mu_product`` (the product of all ``μ``), ``exp_avg``, ``exp_avg_sq``.
    Reference: Dozat, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ.
    """

    OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize")
    NUMBERS = numbers_of("lr beta1 one_minus_beta1 beta2 one_minus_beta2 log_beta2 eps weight_decay decay_factor warmup")
    ZEROS = ("exp_avg", "exp_avg_sq")
    SCALARS = ("step", "mu_product")

    decoupled_weight_decay: bool = False

    def number(self, name: str, options: Options) -> float:
        # the momentum's warm-up is 0.96 ** (step * momentum_decay)
        return number(options["momentum_decay"]) * math.log(0.96) if name == "warmup" else super().number(name, options)

    def init(self, param: jax.Array, options: Options) -> State:
        return {"step": new_step(), "mu_product": jnp.ones((), jnp.float32), **super().init(param, options)}  # in torch's order

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        step = state["step"] + 1
        param, grad = with_decay(param, grad, n, self.decoupled_weight_decay)
        mu = n.beta1 * (1 - 0.5 * jnp.exp(step * n.warmup))
        mu_next = n.beta1 * (1 - 0.5 * jnp.exp((step + 1) * n.warmup))
        mu_product = state["mu_product"] * mu
        exp_avg = moving_average(state["exp_avg"], grad, n.beta1, n.one_minus_beta1)
        exp_avg_sq = moving_average(state["exp_avg_sq"], jnp.square(grad), n.beta2, n.one_minus_beta2)
        denominator = jnp.sqrt(exp_avg_sq / bias_correction(n.log_beta2, step)) + n.eps
        param = param - (n.lr * (1 - mu) / (1 - mu_product)) * (grad / denominator)
        param = param - (n.lr * mu_next / (1 - mu_product * mu_next)) * (exp_avg / denominator)
        return param, {"step": step, "mu_product": mu_product, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
