"""The recurrence of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as ``lax.scan``, and its backward as a scan in reverse.

Shapes: T time steps, B batch, H hidden size, G gates (4 H for LSTM, 3 H for GRU, H for RNN).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import xlatrain.bridge.capture.traceable.recurrent  # noqa: F401  defines the ops
from xlatrain.bridge.lower.registry import lowers

Cell = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(gates of the input, gates of the state, h, c) → (h, c), element by element. Cells without c carry one of size 0."""


def _lstm(of_input: jax.Array, of_state: jax.Array, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Advance an LSTM by one step, given the gates' terms (B, 4 H) of input and state; the states are (B, H)."""
    i, f, g, o = jnp.split(of_input + of_state, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(of_input: jax.Array, of_state: jax.Array, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Advance a GRU by one step, given the gates' terms (B, 3 H) of input and state; ``c`` is passed through."""
    r_x, z_x, n_x = jnp.split(of_input, 3, axis=-1)
    r_h, z_h, n_h = jnp.split(of_state, 3, axis=-1)
    z = jax.nn.sigmoid(z_x + z_h)
    n = jnp.tanh(n_x + jax.nn.sigmoid(r_x + r_h) * n_h)
    return n + z * (h - n), c


def _rnn_tanh(of_input: jax.Array, of_state: jax.Array, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.tanh(of_input + of_state), c


def _rnn_relu(of_input: jax.Array, of_state: jax.Array, h: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.nn.relu(of_input + of_state), c


_CELLS: dict[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn_tanh, "rnn_relu": _rnn_relu}


def _advance(
    cell: str, valid: jax.Array | None, of_input: jax.Array, of_state: jax.Array, h: jax.Array, c: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Advance the states (B, H) by one step, where it is ``valid`` (B,).

    They keep their dtype where the gates are 16-bit (autocast).
    """
    new_h, new_c = _CELLS[cell](of_input, of_state, h, c)
    new_h, new_c = new_h.astype(h.dtype), new_c.astype(c.dtype)
    if valid is None:
        return new_h, new_c
    return jnp.where(valid[:, None], new_h, h), jnp.where(valid[:, None], new_c, c)


@lowers("xlatrain.recurrence.default")
def recurrence(
    cell: str,
    gates: jax.Array,
    h0: jax.Array,
    c0: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    reverse: bool,
    valid: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``gates`` (T, B, G) of the input, ``weight`` (G, H), ``bias`` (G,) → h and c after each step (T, B, H).

    A step that is not ``valid`` (T, B) leaves them as they are.
    """
    weight = weight.T  # once: XLA:CPU multiplies a few rows by it at 137 instead of 111 GFLOP/s

    def step(
        state: tuple[jax.Array, jax.Array], at: tuple[jax.Array, jax.Array | None]
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        (h, c), (of_input, is_valid) = state, at
        state = _advance(cell, is_valid, of_input, h.astype(weight.dtype) @ weight + bias, h, c)
        return state, state

    _, states = lax.scan(step, (h0, c0), (gates, valid), reverse=reverse)
    return states


@lowers("xlatrain.recurrence_backward.default")
def recurrence_backward(
    cell: str,
    grad_h: jax.Array,
    grad_c: jax.Array,
    gates: jax.Array,
    h0: jax.Array,
    c0: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    reverse: bool,
    valid: jax.Array | None,
    h: jax.Array,
    c: jax.Array,
) -> tuple[jax.Array, ...]:
    """Gradients by gates, h0, c0, weight and bias.

    All states are known, so that the products of states with ``weight`` and the gradient by ``weight`` are one product over all
    steps; only the gradient of the state itself runs step by step.
    """
    h_before, c_before = _before(h, h0, reverse), _before(c, c0, reverse)
    of_state = h_before.astype(weight.dtype) @ weight.T + bias

    def step(
        grads: tuple[jax.Array, jax.Array], at: tuple[Any, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        is_valid, *inputs, grad_h_here, grad_c_here = at
        _, pullback = jax.vjp(functools.partial(_advance, cell, is_valid), *inputs)
        by_input, by_state, by_h, by_c = pullback((grads[0] + grad_h_here, grads[1] + grad_c_here))
        return (by_h + (by_state @ weight).astype(by_h.dtype), by_c), (by_input, by_state)

    zeros = jnp.zeros_like(h0), jnp.zeros_like(c0)
    steps = valid, gates, of_state, h_before, c_before, grad_h, grad_c
    (grad_h0, grad_c0), (by_input, by_state) = lax.scan(step, zeros, steps, reverse=not reverse)
    by_weight = jnp.einsum("tbg,tbh->gh", by_state, h_before.astype(weight.dtype))
    return by_input, grad_h0, grad_c0, by_weight, jnp.sum(by_state, axis=(0, 1))


def _before(states: jax.Array, first: jax.Array, reverse: bool) -> jax.Array:
    """The state that each step began with: (T, B, H), given the states after each step and the first."""
    if reverse:
        return jnp.concatenate([states[1:], first[None]])
    return jnp.concatenate([first[None], states[:-1]])
