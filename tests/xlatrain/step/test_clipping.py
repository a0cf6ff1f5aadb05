"""Gradient clipping against ``torch.nn.utils``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from xlatrain.step.clipping import clip_by_norm, clip_by_value, total_norm


def gradients(scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in {"w": (8, 4), "b": (3,), "s": ()}.items()
    }


def torch_parameters(grads: dict[str, np.ndarray]) -> list[torch.nn.Parameter]:
    found = []
    for grad in grads.values():
        param = torch.nn.Parameter(torch.zeros(grad.shape))
        param.grad = torch.tensor(grad)
        found.append(param)
    return found


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6])
def test_clip_by_norm_is_torchs(norm_type: float, max_norm: float) -> None:
    grads = gradients()
    params = torch_parameters(grads)
    expected_norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    clipped, norm = jax.jit(clip_by_norm, static_argnums=2)(grads, max_norm, norm_type)
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-6)
    for name, param in zip(grads, params, strict=True):
        assert param.grad is not None
        np.testing.assert_allclose(clipped[name], param.grad, rtol=1e-6, atol=1e-9)


def test_norm_of_non_finite_gradients_spreads_as_in_torch() -> None:
    for bad in (math.inf, math.nan):
        grads = gradients()
        grads["b"][1] = bad
        params = torch_parameters(grads)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        clipped, norm = clip_by_norm(grads, 1.0)
        assert not np.isfinite(norm)
        for name, param in zip(grads, params, strict=True):
            np.testing.assert_array_equal(clipped[name], param.grad)


def test_clip_by_value_is_torchs() -> None:
    grads = gradients()
    grads["b"][0] = math.nan
    params = torch_parameters(grads)
    torch.nn.utils.clip_grad_value_(params, 0.3)
    clipped = jax.jit(clip_by_value)(grads, 0.3)
    for name, param in zip(grads, params, strict=True):
        np.testing.assert_array_equal(clipped[name], param.grad)


def test_missing_gradients_stay_missing() -> None:
    grads: dict[str, Any] = {**gradients(), "unused": None}
    clipped, norm = clip_by_norm(grads, 0.5)
    assert clipped["unused"] is None
    assert clip_by_value(grads, 0.5)["unused"] is None
    assert norm == total_norm(gradients())
    assert total_norm({"unused": None}) == 0


def test_limit_is_a_runtime_input() -> None:
    clip = jax.jit(lambda grads, limit: clip_by_norm(grads, limit))  # a function of its own: caches are per function
    for limit in (0.1, 0.2):
        clipped, _ = clip(gradients(), np.float32(limit))
        np.testing.assert_allclose(total_norm(clipped), limit, rtol=1e-5)
    assert clip._cache_size() == 1


def test_half_precision_gradients_keep_their_dtype_and_do_not_overflow() -> None:
    grads = {name: jnp.asarray(value, jnp.float16) for name, value in gradients(1000.0).items()}
    clipped, norm = clip_by_norm(grads, 1.0)
    assert np.isfinite(norm)
    assert all(value.dtype == jnp.float16 for value in clipped.values())
    np.testing.assert_allclose(total_norm(clipped), 1.0, rtol=1e-3)


def test_complex_gradient_cannot_be_clipped_by_value() -> None:
    with pytest.raises(ValueError, match=r"gradient \['z'\] is complex64.*clip_by_norm"):
        clip_by_value({"z": jnp.zeros(2, jnp.complex64)}, 1.0)
