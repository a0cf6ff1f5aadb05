"""Rectified Adam: ``torch.optim.RAdam``."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import bias_correction, log, moving_average, new_step, number, with_decay
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule


class RAdamNumbers(NamedTuple):
    """Option values of :class:`RAdam`, and what is derived of them: Python floats on the host, scalars in the program."""

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
    rho_inf: float
    """``2 / (1 - beta2) - 1``: the length that the moving average's memory tends to."""
    rho_offset: float
    """``rho_inf - 2 / a`` with ``a = -log(beta2)``: near zero, the difference of two large numbers (see :func:`_rho`)."""


@dataclasses.dataclass(frozen=True)
class RAdam(UpdateRule):
    r"""Adam whose adaptive rate is scaled by ``√((ρ-4)(ρ-2)ρ∞ / ((ρ∞-4)(ρ∞-2)ρ))`` and left out while ``ρ ≤ 5``.

    State: ``step``, ``exp_avg``, ``exp_avg_sq``. Reference: Liu et al., https://arxiv.org/abs/1908.03265.
    """

    OPTIONS = ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
    NUMBERS = RAdamNumbers

    decoupled_weight_decay: bool = False

    def numbers(self, options: Options) -> Numbers:
        lr, weight_decay = number(options["lr"]), number(options["weight_decay"])
        beta1, beta2 = map(number, options["betas"])
        rho_inf = 2 / (1 - beta2) - 1
        rho_offset = rho_inf + 2 / log(beta2) if beta2 > 0 else rho_inf
        return RAdamNumbers(
            lr, beta1, 1 - beta1, log(beta1), beta2, 1 - beta2, log(beta2), number(options["eps"]), weight_decay,
            1 - lr * weight_decay, rho_inf, rho_offset,
        )  # fmt: skip

    def init(self, param: jax.Array, options: Options) -> State:
        return {"step": new_step(), "exp_avg": jnp.zeros_like(param), "exp_avg_sq": jnp.zeros_like(param)}

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        step = state["step"] + 1
        param, grad = with_decay(param, grad, n, self.decoupled_weight_decay)
        exp_avg = moving_average(state["exp_avg"], grad, n.beta1, n.one_minus_beta1)
        exp_avg_sq = moving_average(state["exp_avg_sq"], jnp.square(grad), n.beta2, n.one_minus_beta2)
        rho = _rho(n, step)
        rectified = rho > 5
        variance = (rho - 4) * (rho - 2) * n.rho_inf / ((n.rho_inf - 4) * (n.rho_inf - 2) * rho)
        factor = jnp.sqrt(jnp.where(rectified, variance, 1)) * jnp.sqrt(bias_correction(n.log_beta2, step))
        scale = jnp.where(rectified, factor / (jnp.sqrt(exp_avg_sq) + n.eps), 1)
        param = param - exp_avg / bias_correction(n.log_beta1, step) * n.lr * scale
        return param, {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _rho(n: Numbers, step: jax.Array) -> jax.Array:
    r"""``ρ∞ - 2 t β₂ᵗ / (1 - β₂ᵗ)``, the length of the moving average's memory after ``t`` steps.

    For small ``t`` that is the difference of two numbers near ``ρ∞``, of which float32 leaves four digits. With
    ``x = -t log β₂`` and ``a = x / t`` the second term is ``(2 / a) · x / (eˣ - 1)``, and ``x / (eˣ - 1) = y coth y - y``
    for ``y = x / 2``: so ``ρ = (ρ∞ - 2 / a) + t - (2 / a) (y coth y - 1)``, of which the first term comes from the host in
    double and the last from the series of ``y coth y - 1``.
    """
    x = -step * n.log_beta2
    y2 = jnp.square(x / 2)
    y_coth_y_minus_1 = y2 * (1 / 3 - y2 * (1 / 45 - y2 * (2 / 945 - y2 / 4725)))
    near = n.rho_offset + step + 2 / n.log_beta2 * y_coth_y_minus_1
    far = n.rho_inf - 2 * step / jnp.expm1(x)
    return jnp.where(x < 1, near, far)
