"""Second moments as an outer product: ``torch.optim.Adafactor``."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import new_step
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class Adafactor(UpdateRule):
    r"""Adaptive rates whose second moment is kept per row and per column of the last two dims, and updates clipped to RMS ``d``.

    State: ``step``; ``row_var`` (the parameter's shape, last dim 1) and ``col_var`` (second last dim 1), or for vectors and
    scalars ``variance``. Real parameters only, as in torch. Reference: Shazeer and Stern, https://arxiv.org/abs/1804.04235.
    """

    OPTIONS = ("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize")
    NUMBERS = numbers_of("lr beta2_decay eps1 eps2 d decay_factor")

    eps1_of_dtype: bool = False
    """``eps[0]`` is None: the machine epsilon of the parameter's dtype."""

    @classmethod
    def from_options(cls, options: Options) -> Adafactor:
        return cls(maximize=bool(options.get("maximize", False)), eps1_of_dtype=options["eps"][0] is None)

    def number(self, name: str, options: Options) -> float:
        return 0.0 if name == "eps1" and options["eps"][0] is None else super().number(name, options)

    def init(self, param: jax.Array, options: Options) -> State:
        if jnp.iscomplexobj(param):
            raise ValueError(f"Adafactor does not support complex parameters (got {param.dtype}); use torch.optim.AdamW for it")
        if param.ndim < 2:
            return {"step": new_step(), "variance": jnp.zeros_like(param)}
        *lead, rows, columns = param.shape
        return {
            "step": new_step(),
            "row_var": jnp.zeros((*lead, rows, 1), param.dtype),
            "col_var": jnp.zeros((*lead, 1, columns), param.dtype),
        }

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        eps1 = jnp.asarray(jnp.finfo(dtype).eps, param.dtype) if self.eps1_of_dtype else n.eps1
        step = state["step"] + 1
        weight = jnp.power(step, n.beta2_decay)
        rate = jnp.maximum(n.eps2, _rms(param)) * jnp.minimum(n.lr, 1 / jnp.sqrt(step))
        param = param * n.decay_factor
        if grad.ndim < 2:
            variance = _lerp(state["variance"], jnp.square(grad), weight)
            new = {"step": step, "variance": variance}
        else:
            row_var = _lerp(state["row_var"], jnp.mean(jnp.square(grad), axis=-1, keepdims=True), weight)
            col_var = _lerp(state["col_var"], jnp.mean(jnp.square(grad), axis=-2, keepdims=True), weight)
            variance = row_var * col_var / jnp.maximum(jnp.mean(row_var, axis=-2, keepdims=True), eps1)
            new = {"step": step, "row_var": row_var, "col_var": col_var}
        direction = jax.lax.rsqrt(jnp.maximum(variance, jnp.square(eps1))) * grad
        return param - rate / jnp.maximum(1, _rms(direction) / n.d) * direction, new


def _rms(values: jax.Array) -> jax.Array:
    """The root mean square of all elements, a scalar; 0 for an empty array."""
    return jnp.sqrt(jnp.sum(jnp.square(values))) / math.sqrt(max(values.size, 1))


def _lerp(average: jax.Array, value: jax.Array, weight: jax.Array) -> jax.Array:
    """``average`` moved towards ``value`` (of equal shape) by ``weight``, a scalar."""
    return average + weight * (value - average)
