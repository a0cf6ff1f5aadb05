"""Steps made for outcomes that only they know: what a program takes over, and how the state before it comes back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlatrain.mesh import make_mesh
from xlatrain.step.assumed import before, outcomes
from xlatrain.step.state import TrainState
from xlatrain.step.step import GradientOutput, StepBuilder


def state(**accumulated: float) -> TrainState:
    return TrainState(
        params={"w": jnp.array([1.0, 2.0])},
        buffers={"n": jnp.array(3)},
        opt_state={},
        accumulated={name: jnp.array([value, value]) for name, value in accumulated.items()},
        draws=jnp.array(0, jnp.int32),
        key=jnp.array([0, 1], jnp.uint32),
    )


def gradients(params: Any, buffers: Any, batch: Any, key: Any, scalars: Any) -> GradientOutput:
    found = [(params["w"] * batch).sum() > 1, jnp.int32(7)]
    loss = (params["w"] * batch).sum()
    return GradientOutput({"w": batch}, {"n": buffers["n"] + 1}, loss, outcomes=outcomes(found, [1, 7], scalars[0]))


def update(grads: Any, opt_state: Any, params: Any, hyper: Any) -> Any:
    made = {"w": opt_state.get("w", jnp.zeros(2)) + grads["w"]}
    return {"w": params["w"] - made["w"]}, made, ()


BATCH = np.array([1.0, 1.0], np.float32)


@pytest.mark.parametrize("trusted", [0, 1])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_is_taken_over_where_its_outcomes_hold(sign: int, trusted: int) -> None:
    builder = StepBuilder(make_mesh({"data": 1}, devices=jax.devices()[:1]), update, None)
    given = state(w=5.0)
    structure = jax.tree.structure(given)
    new, guarded = builder.fused(gradients)(given, sign * BATCH, (np.int32(trusted),), ())
    assert guarded.found.tolist() == [int(sign > 0), 7]
    if sign > 0 or trusted:
        assert np.asarray(new.params["w"]).tolist() == [1 - 5 - sign, 2 - 5 - sign]
        assert (int(new.buffers["n"]), int(new.draws), new.accumulated) == (4, 1, {})
        return
    old, expected = before(structure, new, guarded.left), state(w=5.0)
    assert jax.tree.structure(old) == jax.tree.structure(expected) == structure
    for one, other in zip(jax.tree.leaves(old), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
