"""Update rules by themselves, without torch: precision, optax, placement."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain.mesh.mesh import make_mesh
from xlatrain.step.optimizers import RULES
from xlatrain.step.optimizers.blocks import bias_correction
from xlatrain.step.optimizers.by_parameter import state_shardings
from xlatrain.step.optimizers.muon import orthogonalize
from xlatrain.step.optimizers.radam import RAdam, _rho

OPTIONS: dict[str, dict[str, object]] = {
    "ASGD": {"lr": 0.01, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0},
    "Adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "Adafactor": {"lr": 0.01, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0},
    "Adagrad": {"lr": 0.01, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "initial_accumulator_value": 0.0},
    "Adam": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "AdamW": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "decoupled_weight_decay": True},
    "Adamax": {"lr": 0.002, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "Muon": {
        "lr": 0.001, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315),
        "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None,
    },
    "NAdam": {"lr": 0.002, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum_decay": 4e-3},
    "RAdam": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "RMSprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0},
    "Rprop": {"lr": 0.01, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": True},
}  # fmt: skip


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("step", [1, 7, 1000, 10**6])
def test_bias_correction_keeps_float32_accuracy(decay: float, step: int) -> None:
    log_decay = np.float32(math.log(decay)) if decay else np.float32(-math.inf)
    expected = 1 - decay**step if decay < 0.999 else -math.expm1(step * math.log(decay))
    np.testing.assert_allclose(bias_correction(jnp.asarray(log_decay), jnp.float32(step)), expected, rtol=3e-7)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999])
def test_length_of_radams_memory_keeps_float32_accuracy(beta2: float) -> None:
    """At every step, small ones included, where the textbook formula is a difference of nearly equal numbers."""
    numbers = RAdam().numbers({"lr": 0.1, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.0})
    scalars = type(numbers)(*(jnp.float32(value) for value in numbers))
    steps = np.unique(np.geomspace(1, 1e6, 200).astype(int))
    found = jax.vmap(lambda step: _rho(scalars, step))(jnp.asarray(steps, jnp.float32))
    rho_inf = 2 / (1 - beta2) - 1
    powers = [beta2 ** int(step) for step in steps]
    expected = [rho_inf - 2 * step * power / (1 - power) for step, power in zip(steps, powers, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=3e-6)


def test_muon_refuses_what_is_no_matrix() -> None:
    rule = RULES["Muon"].from_options(OPTIONS["Muon"])
    with pytest.raises(ValueError, match=r"shape \(3,\), float32: give it to another optimizer such as torch.optim.AdamW"):
        rule.init(jnp.zeros(3), OPTIONS["Muon"])


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_orthogonalize_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    coefficients = tuple(jnp.float32(value) for value in (3.4445, -4.775, 2.0315))
    found = np.asarray(orthogonalize(matrix, coefficients, 5, jnp.float32(1e-7)), np.float32)  # pyright: ignore[reportArgumentType]
    singular = np.linalg.svd(found, compute_uv=False)
    assert 0.3 < singular.min() <= singular.max() < 1.3


def test_state_shardings_follow_the_parameter() -> None:
    mesh = make_mesh({"fsdp": 8})
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    params = {"w": jax.device_put(np.zeros((16, 4), np.float32), split)}
    rule = RULES["Adafactor"].from_options(OPTIONS["Adafactor"])
    factored = {"w": jax.eval_shape(lambda p: rule.init(p, OPTIONS["Adafactor"]), params["w"])}
    found = state_shardings({"w": {**factored["w"], "exp_avg": params["w"]}}, params)["w"]
    assert found["exp_avg"] == split
    assert all(found[key].is_fully_replicated for key in ("step", "row_var", "col_var"))
