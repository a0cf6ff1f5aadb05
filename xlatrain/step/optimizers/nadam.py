"""Adam with Nesterov momentum: ``torch.optim.NAdam``."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import bias_correction, log, moving_average, new_step, number, with_decay
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule


class NAdamNumbers(NamedTuple):
    """Option values of :class:`NAdam`, and what is derived of them: Python floats on the host, scalars in the program."""

    lr: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    log_beta2: float
    eps: float
    weight_decay: float
    decay_factor: float
    log_warmup: float
    """``momentum_decay * log(0.96)``: the momentum's warm-up is ``0.96 ** (step * momentum_decay)``."""


@dataclasses.dataclass(frozen=True)
class NAdam(UpdateRule):
    r"""Adam whose first moment looks ahead with a momentum ``μ_t = β₁ (1 - ½ 0.96^{tψ})`` that warms up.

    State: ``step``, ``mu_product`` (the product of all ``μ``), ``exp_avg``, ``exp_avg_sq``.
    Reference: Dozat, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ.
    """

    OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize")
    NUMBERS = NAdamNumbers
    SCALARS = ("step", "mu_product")

    decoupled_weight_decay: bool = False

    def numbers(self, options: Options) -> Numbers:
        lr, weight_decay = number(options["lr"]), number(options["weight_decay"])
        beta1, beta2 = map(number, options["betas"])
        return NAdamNumbers(
            lr, beta1, 1 - beta1, beta2, 1 - beta2, log(beta2), number(options["eps"]), weight_decay,
            1 - lr * weight_decay, number(options["momentum_decay"]) * math.log(0.96),
        )  # fmt: skip

    def init(self, param: jax.Array, options: Options) -> State:
        return {
            "step": new_step(),
            "mu_product": jnp.ones((), jnp.float32),
            "exp_avg": jnp.zeros_like(param),
            "exp_avg_sq": jnp.zeros_like(param),
        }

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        step = state["step"] + 1
        param, grad = with_decay(param, grad, n, self.decoupled_weight_decay)
        mu = n.beta1 * (1 - 0.5 * jnp.exp(step * n.log_warmup))
        mu_next = n.beta1 * (1 - 0.5 * jnp.exp((step + 1) * n.log_warmup))
        mu_product = state["mu_product"] * mu
        exp_avg = moving_average(state["exp_avg"], grad, n.beta1, n.one_minus_beta1)
        exp_avg_sq = moving_average(state["exp_avg_sq"], jnp.square(grad), n.beta2, n.one_minus_beta2)
        denominator = jnp.sqrt(exp_avg_sq / bias_correction(n.log_beta2, step)) + n.eps
        param = param - (n.lr * (1 - mu) / (1 - mu_product)) * (grad / denominator)
        param = param - (n.lr * mu_next / (1 - mu_product * mu_next)) * (exp_avg / denominator)
        return param, {"step": step, "mu_product": mu_product, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
