"""The programs of a training step, and the position in the random stream."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlatrain.mesh.mesh import make_mesh
from xlatrain.step.state import TrainState, step_key
from xlatrain.step.step import GradientOutput, StepBuilder, pack_scalars


def descend(grads: Any, opt_state: Any, params: Any, hyper: Any) -> tuple[Any, Any, Any]:
    return {name: p if grads[name] is None else p - hyper * grads[name] for name, p in params.items()}, opt_state, ()


def new_state() -> TrainState:
    return TrainState({"w": jnp.ones(2)}, {}, {}, {}, jnp.zeros((), jnp.int32), jnp.asarray([0, 42], jnp.uint32))


def noise(params: Any, buffers: Any, batch: Any, key: jax.Array, scalars: Any) -> GradientOutput:
    """Gradients that show which key the step had."""
    drawn = jax.random.normal(key, (2,))
    return GradientOutput({"w": drawn}, {}, drawn)


def builder(draws: bool) -> StepBuilder:
    return StepBuilder(make_mesh({"data": 1}, devices=jax.devices()[:1]), descend, None, draws=draws)


@pytest.mark.parametrize("mode", ["fused", "accumulate", "split"])
def test_each_step_that_draws_has_its_own_numbers(mode: str) -> None:
    program, state, seen = getattr(builder(draws=True), mode)(noise), new_state(), []
    for n in range(3):
        expected = jax.random.normal(step_key(state), (2,))
        arguments = (0.1,) if mode == "fused" else ()
        state, out = program(state, (), (), *arguments)
        drawn = {"fused": lambda o: o[0], "accumulate": lambda o: o, "split": lambda o: o[1]}[mode](out)
        np.testing.assert_array_equal(drawn, expected)
        assert int(state.draws) == n + 1
        seen.append(tuple(np.asarray(drawn).tolist()))
    assert len(set(seen)) == 3


@pytest.mark.parametrize("mode", ["fused", "accumulate", "split"])
def test_a_step_that_draws_nothing_leaves_the_stream_where_it_is(mode: str) -> None:
    def gradients(params: Any, buffers: Any, batch: Any, key: jax.Array, scalars: Any) -> GradientOutput:
        return GradientOutput({"w": batch}, {}, batch.sum())

    program, state = getattr(builder(draws=False), mode)(gradients), new_state()
    for _ in range(3):
        state, _ = program(state, jnp.ones(2), (), *((0.1,) if mode == "fused" else ()))
    assert int(state.draws) == 0
    assert np.asarray(state.key).tolist() == [0, 42]


def test_the_update_alone_draws_nothing() -> None:
    state, _ = builder(draws=True).apply()(new_state(), {"w": jnp.ones(2)}, 0.5)
    assert state.params["w"].tolist() == [0.5, 0.5]
    assert int(state.draws) == 0


def test_programs_share_one_stream() -> None:
    """A step that accumulates and one that updates draw different numbers, in any order."""
    state, first = builder(draws=True).accumulate(noise)(new_state(), (), ())
    _, (second, _) = builder(draws=True).fused(noise)(state, (), (), 0.1)
    assert np.asarray(first).tolist() != np.asarray(second).tolist()


def test_scalars_are_packed_in_order() -> None:
    packed = pack_scalars([jnp.float32(1.5), jnp.int32(7), jnp.bfloat16(0.25), jnp.asarray([True])])
    assert packed.dtype == jnp.float32
    assert packed.tolist() == [1.5, 7.0, 0.25, 1.0]
    assert pack_scalars([]).shape == (0,)
