"""Orthogonalised momentum: ``torch.optim.Muon``."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import moving_average, new_step, number
from xlatrain.step.optimizers.rule import Numbers, Options, State, UpdateRule, numbers_of


@dataclasses.dataclass(frozen=True)
class Muon(UpdateRule):
    r"""``b ← μ b + (1 - μ) g``; ``θ ← (1 - γ λ) θ - γ' NS(b)`` (nesterov: ``NS(g + μ (b - g))``), ``NS`` the Newton–Schulz
    iteration towards the nearest orthogonal matrix, in bfloat16 as in torch, ``γ'`` the rate adjusted to the matrix's shape.

    State: ``momentum_buffer``, and a hidden ``step`` that tells whether torch would have state. Real matrices only.
    References: Jordan, https://kellerjordan.github.io/posts/muon/; Liu et al. (``match_rms_adamw``),
    https://arxiv.org/abs/2502.16982.
    """

    OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    NUMBERS = numbers_of("lr momentum one_minus_momentum decay_factor a b c eps")
    HIDDEN = ("step",)

    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: str | None = None

    @classmethod
    def from_options(cls, options: Options) -> Muon:
        steps = int(options["ns_steps"])
        if steps >= 100:
            raise ValueError(f"Muon: ns_steps is {steps}, expected fewer than 100")
        return cls(nesterov=bool(options["nesterov"]), ns_steps=steps, adjust_lr_fn=options["adjust_lr_fn"])

    def number(self, name: str, options: Options) -> float:
        if name not in ("a", "b", "c"):
            return super().number(name, options)
        if len(options["ns_coefficients"]) != 3:
            raise ValueError(f"Muon: ns_coefficients is {options['ns_coefficients']}, expected three numbers (a, b, c)")
        return number(options["ns_coefficients"]["abc".index(name)])

    def init(self, param: jax.Array, options: Options) -> State:
        if param.ndim != 2 or jnp.iscomplexobj(param):
            raise ValueError(
                f"Muon updates real matrices; found a parameter of shape {param.shape}, {param.dtype}: give it to another "
                "optimizer such as torch.optim.AdamW"
            )
        return {"momentum_buffer": jnp.zeros_like(param), "step": new_step()}

    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        n = numbers
        buffer = moving_average(state["momentum_buffer"], grad, n.momentum, n.one_minus_momentum)
        direction = moving_average(buffer, grad, n.momentum, n.one_minus_momentum) if self.nesterov else buffer
        direction = orthogonalize(direction, (n.a, n.b, n.c), self.ns_steps, n.eps)
        rate = n.lr * self._rate_factor(param.shape)
        param = param * n.decay_factor - rate * direction.astype(param.dtype)
        return param, {"momentum_buffer": buffer, "step": state["step"] + 1}

    def _rate_factor(self, shape: tuple[int, ...]) -> float:
        rows, columns = shape
        if self.adjust_lr_fn in (None, "original"):
            return math.sqrt(max(1, rows / columns))
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return 1.0


def orthogonalize(
    matrix: jax.Array, coefficients: tuple[jax.Array, jax.Array, jax.Array], steps: int, eps: jax.Array
) -> jax.Array:
    """``steps`` quintic Newton–Schulz iterations ``X ← a X + (b A + c A²) X``, ``A = X Xᵀ``, on bfloat16 values.

    Args:
        matrix: [rows, columns], any float dtype.
        coefficients: ``(a, b, c)``.
        eps: least Frobenius norm to divide by.

    Returns:
        bfloat16 [rows, columns], singular values near 1.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = _bfloat16(matrix.T if tall else matrix)
    norm = _bfloat16(jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)))))
    x = _bfloat16(x.astype(jnp.float32) / jnp.maximum(norm.astype(jnp.float32), eps))
    for _ in range(steps):
        gram = _bfloat16(_matmul(x, x.T))
        mixed = _bfloat16(b * gram.astype(jnp.float32) + c * _matmul(gram, gram))
        x = _bfloat16(a * x.astype(jnp.float32) + _matmul(mixed, x))
    return x.T if tall else x


def _bfloat16(values: jax.Array) -> jax.Array:
    """``values`` really rounded to bfloat16: XLA may drop a conversion there and back to gain precision."""
    return jax.lax.reduce_precision(values.astype(jnp.float32), exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _matmul(left: jax.Array, right: jax.Array) -> jax.Array:
    """The product of two matrices, summed in float32: float32 [rows, columns]."""
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)
