"""Loss scaling against ``torch.amp.GradScaler``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from xlatrain.step.loss_scale import LossScaler, LossScaleState

OPTIONS: dict[str, Any] = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 3}
OVERFLOWS = [False, False, True, False, False, False, False, True, True, False, False, False, False, False, False]


def test_follows_grad_scaler_step_by_step() -> None:
    """The same overflows: the same scales, the same skipped steps."""
    reference = torch.amp.GradScaler("cpu", **OPTIONS)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler = LossScaler(**OPTIONS)

    @jax.jit
    def step(value: jax.Array, state: LossScaleState, factor: jax.Array) -> tuple[jax.Array, LossScaleState]:
        scaled, grads = jax.value_and_grad(lambda v: scaler.scale(jnp.sum(v * v) * factor, state))(value)
        del scaled
        unscaled, found_inf = scaler.unscale({"p": grads, "unused": None}, state)
        new = value - 0.1 * unscaled["p"]
        return scaler.keep_if(found_inf, value, new), scaler.update(state, found_inf)

    value, state = jnp.ones(2), scaler.init()
    for overflow in OVERFLOWS:
        factor = math.inf if overflow else 1.0
        optimizer.zero_grad()
        reference.scale((param * param).sum() * factor).backward()
        reference.step(optimizer)
        reference.update()
        value, state = step(value, state, jnp.asarray(factor))
        assert scaler.state_dict(state) == reference.state_dict()
        np.testing.assert_allclose(value, param.detach().numpy(), rtol=1e-6)


def test_state_goes_to_grad_scaler_and_back() -> None:
    scaler = LossScaler(**OPTIONS)
    state = LossScaleState(jnp.asarray(64.0), jnp.asarray(2, jnp.int32))
    reference = torch.amp.GradScaler("cpu")
    reference.load_state_dict(scaler.state_dict(state))
    assert reference.get_scale() == 64.0
    again, again_state = LossScaler.from_state_dict(reference.state_dict())
    assert (again.growth_factor, again.backoff_factor, again.growth_interval) == (2.0, 0.25, 3)
    assert again.state_dict(again_state) == scaler.state_dict(state)


def test_scale_never_grows_to_infinity() -> None:
    scaler = LossScaler(growth_interval=1)
    largest = jnp.asarray(np.float32(2.0**127))
    state = scaler.update(LossScaleState(largest, jnp.asarray(0, jnp.int32)), jnp.asarray(False))
    assert state.scale == largest


@pytest.mark.parametrize(("options", "message"), [
    ({"growth_factor": 1.0}, r"growth_factor is 1.0, expected more than 1.0"),
    ({"backoff_factor": 1.0}, r"backoff_factor is 1.0, expected less than 1.0"),
])  # fmt: skip
def test_factors_on_the_wrong_side_of_one(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScaler(**options)  # pyright: ignore[reportArgumentType]


def test_float16_gradients_are_refused_by_path() -> None:
    scaler = LossScaler()
    with pytest.raises(ValueError, match=r"gradient \['w'\] is float16.*16-mixed"):
        scaler.unscale({"w": jnp.zeros(2, jnp.float16)}, scaler.init())


def test_empty_state_dict_of_a_disabled_scaler_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks \['_growth_tracker'.*enabled=False"):
        LossScaler.from_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
