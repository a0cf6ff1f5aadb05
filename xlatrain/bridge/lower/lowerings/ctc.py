"""Connectionist temporal classification (Graves et al. 2006) by the forward recursion in log space.

https://docs.pytorch.org/docs/stable/generated/torch.nn.CTCLoss.html
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

import xlatrain.bridge.capture.decompositions.ctc  # noqa: F401  defines the ops
from xlatrain.bridge.lower.registry import lowers


def _log_sum_exp(*terms: jax.Array) -> jax.Array:
    """The logarithm of the sum of exponentials of arrays of one shape; -inf, with gradient zero, where all terms are -inf."""
    stacked = jnp.stack(terms)
    highest = lax.stop_gradient(jnp.max(stacked, axis=0))
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    total = jnp.sum(jnp.exp(stacked - highest), axis=0)
    return jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + highest, -jnp.inf)


def _shifted(alpha: jax.Array, by: int) -> jax.Array:
    """``alpha`` (N, L) of the state ``by`` places before."""
    return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=-jnp.inf)[:, : alpha.shape[1]]


def _losses(
    log_probs: jax.Array, targets: jax.Array, input_lengths: jax.Array, target_lengths: jax.Array, blank: int
) -> jax.Array:
    """Negative log likelihoods (N,); inf where the input is too short for the target."""
    n, longest = targets.shape
    targets = jnp.where(jnp.arange(longest) < target_lengths[:, None], targets, blank)
    # blank, label, blank, label, …, blank
    between = jnp.stack([jnp.full_like(targets, blank), targets], axis=2).reshape(n, 2 * longest)
    states = jnp.pad(between, ((0, 0), (0, 1)), constant_values=blank).astype(jnp.int32)
    may_skip = (states != blank) & (states != jnp.pad(states, ((0, 0), (2, 0)), constant_values=-1)[:, :-2])
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(states, (log_probs.shape[0], *states.shape)), axis=2)

    def step(alpha: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        time, emission = at
        before = jnp.where(may_skip, _shifted(alpha, 2), -jnp.inf)
        moved = _log_sum_exp(alpha, _shifted(alpha, 1), before) + emission
        return jnp.where((time < input_lengths)[:, None], moved, alpha), None

    # the first step is in the first blank or the first label
    place = jnp.arange(states.shape[1])
    begin = jnp.where((place < 2) & (place < 1 + 2 * target_lengths[:, None]), emitted[0], -jnp.inf)
    times = jnp.arange(1, log_probs.shape[0])
    alpha, _ = lax.scan(step, begin, (times, emitted[1:]))
    last = 2 * target_lengths[:, None]
    on_blank = jnp.take_along_axis(alpha, last, axis=1)
    on_label = jnp.where(last > 0, jnp.take_along_axis(alpha, jnp.maximum(last - 1, 0), axis=1), -jnp.inf)
    return -_log_sum_exp(on_blank, on_label)[:, 0]


@lowers("xlatrain.ctc_loss.default")
def ctc_loss(
    log_probs: jax.Array, targets: jax.Array, input_lengths: jax.Array, target_lengths: jax.Array, blank: int, zero_infinity: bool
) -> tuple[jax.Array, jax.Array]:
    """``log_probs`` (T, N, C), ``targets`` (N, S), lengths (N,) → losses (N,) and their gradients (T, N, C).

    The gradient is torch's, which takes ``log_probs`` for the result of a log-softmax: it contains that function's own share.
    """
    losses, pullback = jax.vjp(lambda x: _losses(x, targets, input_lengths, target_lengths, blank), log_probs)
    (occupancy,) = pullback(jnp.ones_like(losses))
    gradient = jnp.exp(log_probs) + occupancy
    within = jnp.arange(log_probs.shape[0])[:, None, None] < input_lengths[:, None]
    gradient = jnp.where(jnp.isinf(losses)[:, None], jnp.nan, gradient)
    return losses, jnp.where(within, gradient, 0)
