"""Rectified Adam: ``torch.optim.RAdam``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import bias_correction, log, moving_average, with_decay
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class RAdam(UpdateRule):
    r"""Adam whose adaptive rate is scaled by ``√((ρ-4)(ρ-2)ρ∞ / ((ρ∞-4)(ρ∞-2)ρ))`` and left out while ``ρ ≤ 5``.

    State: ``step``, ``exp_avg``, ``exp_avg_sq``. Reference: Liu et al., https://arxiv.org/abs/1908.03265.
    """

    OPTIONS = ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
    NUMBERS = numbers_of(
        "lr beta1 one_minus_beta1 log_beta1 beta2 one_minus_beta2 log_beta2 eps weight_decay decay_factor rho_inf rho_offset"
    )
    ZEROS = ("exp_avg", "exp_avg_sq")

    decoupled_weight_decay: bool = False

    def number(self, name: str, options: Options) -> float:
        """``rho_inf`` is the length that the moving average's memory tends to, for ``rho_offset`` see :func:`_rho`."""
        if name not in ("rho_inf", "rho_offset"):
            return super().number(name, options)
        beta2 = self.number("beta2", options)
        rho_inf = 2 / (1 - beta2) - 1
        return rho_inf + 2 / log(beta2) if name == "rho_offset" and beta2 > 0 else rho_inf

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
