"""Optimizer updates as nodes of a captured graph: their order, their state, and that none is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.capture.updates import update_node, use_updates
from xlatrain.bridge.errors import LoweringError
from xlatrain.bridge.lower.interpret import lower


def two_steps(w: torch.Tensor) -> dict[str, Any]:
    """Two updates of ``w²``; the second's result is thrown away."""
    w = w.detach().requires_grad_(True)
    tokens = []
    for call in range(2):
        w.grad = None
        (w * w).sum().backward()
        assert w.grad is not None
        (new,), token = update_node([w], [w.grad], call)
        tokens.append(token)
        if call == 0:
            with torch.no_grad():
                w.copy_(new)
    return {"w": w.detach(), "tokens": tokens}


def test_updates_run_in_order_and_thread_their_state() -> None:
    captured = capture(two_steps, torch.empty(3, device="meta"))
    run = lower(captured)

    def program(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        momentum = jnp.zeros(3)
        calls = []

        def update(call: int, params: Sequence[jax.Array], grads: Sequence[jax.Array], skip: Any) -> list[jax.Array]:
            nonlocal momentum
            calls.append(call)
            momentum = 0.5 * momentum + grads[0]
            return [params[0] - 0.1 * momentum]

        with use_updates(update):
            new = captured.unflatten(run([w], None))["w"]
        assert calls == [0, 1]
        return new, momentum

    w = jnp.asarray([1.0, 2.0, -3.0])
    new, momentum = jax.jit(program)(w)
    assert jnp.allclose(new, 0.8 * w)
    assert jnp.allclose(momentum, 0.5 * 2 * w + 2 * 0.8 * w)  # of the second update too, whose result is not used


def test_an_update_needs_somebody_who_updates() -> None:
    captured = capture(two_steps, torch.empty(3, device="meta"))
    with pytest.raises(LoweringError, match="outside of use_updates"):
        lower(captured)([jnp.ones(3)], None)
