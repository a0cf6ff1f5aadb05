"""Functional optimizers against torch's own, one table for all of them."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)  # fmt: skip

from tests.torch_compat.step._optimizer_run import (
    MATRICES,
    SHAPES,
    FunctionalSide,
    MakeOptimizer,
    TorchSide,
    assert_close,
    initial_values,
    noise,
    numpy_state,
    place,
)  # fmt: skip
from torch_compat.step.optimizers.forms import functional_form
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from xlatrain.step.optimizers import RULES

STEPS = 100
TOLERANCE = 5e-6
MUON_TOLERANCE = 5e-3  # a rounding difference can turn a value of the bfloat16 iteration into its neighbour, 2^-8 away

CASES: dict[str, MakeOptimizer] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD-decay": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "SGD-momentum-dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "SGD-nesterov": lambda p: SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "SGD-maximize": lambda p: SGD(p, lr=0.1, momentum=0.5, maximize=True),
    "Adam": lambda p: Adam(p, lr=0.01),
    "Adam-l2-maximize": lambda p: Adam(p, lr=0.01, weight_decay=0.1, maximize=True),
    "Adam-amsgrad": lambda p: Adam(p, lr=0.01, betas=(0.5, 0.9), amsgrad=True),
    "Adam-decoupled": lambda p: Adam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "Adam-no-memory": lambda p: Adam(p, lr=0.01, betas=(0.0, 0.0)),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "AdamW-amsgrad-maximize": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True, eps=1e-3),
    "AdamW-tensor-lr": lambda p: AdamW(p, lr=torch.tensor(0.01), capturable=False),
    "AdamW-foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "AdamW-fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: NAdam(p, lr=0.01),
    "NAdam-l2": lambda p: NAdam(p, lr=0.01, weight_decay=0.1, momentum_decay=0.1),
    "NAdam-decoupled-maximize": lambda p: NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
    "RAdam": lambda p: RAdam(p, lr=0.01),
    "RAdam-short-memory": lambda p: RAdam(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
    "RAdam-decoupled-maximize": lambda p: RAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
    "Adamax": lambda p: Adamax(p, lr=0.01),
    "Adamax-l2-maximize": lambda p: Adamax(p, lr=0.01, weight_decay=0.1, maximize=True),
    "Adagrad": lambda p: Adagrad(p, lr=0.1),
    "Adagrad-decay": lambda p: Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, maximize=True),
    "Adadelta": lambda p: Adadelta(p, lr=1.0),
    "Adadelta-l2-maximize": lambda p: Adadelta(p, lr=0.5, rho=0.8, weight_decay=0.1, maximize=True),
    "RMSprop": lambda p: RMSprop(p, lr=0.01),
    "RMSprop-centered-momentum": lambda p: RMSprop(p, lr=0.01, centered=True, momentum=0.9, weight_decay=0.1),
    "RMSprop-maximize": lambda p: RMSprop(p, lr=0.01, alpha=0.8, eps=1e-2, maximize=True),
    "Rprop": lambda p: Rprop(p, lr=0.01),
    "Rprop-bounds-maximize": lambda p: Rprop(p, lr=0.01, etas=(0.3, 1.5), step_sizes=(1e-3, 0.05), maximize=True),
    "ASGD": lambda p: ASGD(p, lr=0.1),
    "ASGD-averaging": lambda p: ASGD(p, lr=0.1, lambd=1e-2, alpha=0.5, t0=20, weight_decay=0.1),
    "ASGD-maximize": lambda p: ASGD(p, lr=0.1, maximize=True),
    "Adafactor": lambda p: Adafactor(p, lr=0.05),
    "Adafactor-decay": lambda p: Adafactor(p, lr=0.05, weight_decay=0.1, eps=(1e-4, 1e-2), d=2.0, beta2_decay=-0.5),
    "Adafactor-maximize": lambda p: Adafactor(p, lr=0.05, maximize=True),
    "Muon": lambda p: Muon(p, lr=0.01),
    "Muon-adamw-rate": lambda p: Muon(p, lr=0.01, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3),
}  # fmt: skip


def shapes_of(case: str) -> dict[str, tuple[int, ...]]:
    return MATRICES if case.startswith("Muon") else SHAPES


def tolerance_of(case: str) -> float:
    return MUON_TOLERANCE if case.startswith("Muon") else TOLERANCE


def test_every_dense_class_of_torch_has_a_rule_and_a_case() -> None:
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert set(RULES) == classes - {"LBFGS", "SparseAdam"}
    assert {case.partition("-")[0] for case in CASES} == set(RULES)


# A rule's options change its arithmetic, and the mesh where arrays lie: each option on one device, each rule on eight as well.
ON_EIGHT = [next(case for case in CASES if case.partition("-")[0] == rule) for rule in RULES]


@pytest.mark.parametrize(("case", "n_devices"), [*((case, 1) for case in CASES), *((case, 8) for case in ON_EIGHT)])
def test_same_update_as_torch(case: str, n_devices: int) -> None:
    shapes = shapes_of(case)
    reference = TorchSide(CASES[case], initial_values(shapes))
    ours = FunctionalSide(TorchSide(CASES[case], initial_values(shapes)), n_devices)
    for step in range(STEPS // 4 if case.startswith("Muon") else STEPS):  # whose products take long on a CPU
        reference.step(noise(step, shapes))
        ours.step(noise(step, shapes))
    assert_close(ours.values(), reference.values(), tolerance_of(case))
    assert ours.program._cache_size() == 1
    for name, state in ours.state.items():
        for leaf in state.values():
            if leaf.shape == shapes[name]:
                assert leaf.sharding.is_equivalent_to(ours.params[name].sharding, leaf.ndim)


WITH_STATE = (
    "SGD", "SGD-momentum-dampening", "Adam-amsgrad", "AdamW-tensor-lr", "AdamW-fused", "NAdam", "RAdam", "Adamax",
    "Adagrad-decay", "Adadelta", "RMSprop-centered-momentum", "Rprop", "ASGD-averaging", "Adafactor", "Muon",
)  # fmt: skip


@pytest.mark.parametrize("case", WITH_STATE)
def test_state_to_torch_and_back(case: str) -> None:
    """30 steps of ours, exported and loaded by torch, which takes 10; those imported by ours, which takes 10 more."""
    shapes, tolerance = shapes_of(case), tolerance_of(case)
    reference = TorchSide(CASES[case], initial_values(shapes))
    ours = FunctionalSide(TorchSide(CASES[case], initial_values(shapes)))
    for step in range(30):
        reference.step(noise(step, shapes))
        ours.step(noise(step, shapes))
    exported = ours.functional.export_state(ours.state)
    expected = reference.optimizer.state_dict()
    in_order = {k: list(v) for k, v in expected["state"].items()}
    assert {k: list(v) for k, v in exported["state"].items()} == in_order
    for index, state in expected["state"].items():
        for key, value in state.items():
            assert exported["state"][index][key].dtype == value.dtype
            assert exported["state"][index][key].shape == value.shape

    resumed = TorchSide(CASES[case], ours.values())
    resumed.optimizer.load_state_dict(copy.deepcopy(exported))
    for step in range(30, 40):
        reference.step(noise(step, shapes))
        resumed.step(noise(step, shapes))
    assert_close(resumed.values(), reference.values(), tolerance)
    assert_close(numpy_state(resumed.optimizer, resumed.names), numpy_state(reference.optimizer, reference.names), 2 * tolerance)

    back = FunctionalSide(resumed)
    for step in range(40, 50):
        reference.step(noise(step, shapes))
        back.step(noise(step, shapes))
    assert_close(back.values(), reference.values(), tolerance)


@pytest.mark.parametrize(
    "case", ["SGD-momentum-dampening", "AdamW", "NAdam", "Rprop", "ASGD-averaging", "Adagrad-decay", "Adafactor"]
)
def test_parameter_without_gradient_is_skipped(case: str) -> None:
    """Parameters without gradients: one never has a gradient; another has none at the start and in between."""
    reference = TorchSide(CASES[case], initial_values())
    ours = FunctionalSide(TorchSide(CASES[case], initial_values()))
    for step in range(12):
        without = ("bias", "tall") if step < 3 or step % 4 == 0 else ("bias",)
        for side in (reference, ours):
            side.optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)  # Rprop and ASGD start from the rate of their first gradient
            side.step(noise(step), without)
    assert_close(ours.values(), reference.values(), TOLERANCE)
    np.testing.assert_array_equal(ours.values()["bias"], initial_values()["bias"])
    exported, expected = ours.functional.export_state(ours.state), reference.optimizer.state_dict()
    assert exported["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        if "step" in state:
            assert exported["state"][index]["step"] == state["step"]


def grouped(p: list[torch.nn.Parameter]) -> AdamW:
    return AdamW(
        [
            {"params": [q for q in p if q.ndim > 1], "weight_decay": 0.1},
            {"params": [q for q in p if q.ndim <= 1], "lr": 0.003, "betas": (0.8, 0.99), "amsgrad": True},
        ],
        lr=0.01,
        weight_decay=0.0,
    )


def test_every_number_of_every_group_is_a_runtime_input() -> None:
    reference, ours = TorchSide(grouped, initial_values()), FunctionalSide(TorchSide(grouped, initial_values()))
    for step in range(30):
        for side in (reference, ours):
            first, second = side.optimizer.param_groups
            first["lr"] = 0.01 / (step + 1)
            first["weight_decay"] = 0.01 * step
            second["betas"] = (0.5 + 0.01 * step, 0.9 + 0.003 * step)
            second["eps"] = 1e-8 * (step + 1)
            side.step(noise(step))
    assert_close(ours.values(), reference.values(), TOLERANCE)
    assert ours.program._cache_size() == 1


def test_hyper_is_the_same_read_only_object_until_an_option_changes() -> None:
    side = TorchSide(lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9), initial_values())
    functional = functional_form(side.optimizer, side.names)
    before = functional.hyper()
    assert functional.hyper() is before
    assert before.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 1
    side.optimizer.param_groups[0]["lr"].fill_(0.5)  # in place, as schedulers do with a tensor rate
    assert functional.hyper() is not before
    assert functional.hyper()[0] == np.float32(0.5)


def test_static_key_tells_flags_and_membership_from_numbers() -> None:
    side = TorchSide(grouped, initial_values())
    functional = functional_form(side.optimizer, side.names)
    key = functional.static_key()
    side.optimizer.param_groups[0]["lr"] = 0.5
    assert functional.static_key() == key
    side.optimizer.param_groups[0]["maximize"] = True
    assert functional.static_key() != key
    side.optimizer.param_groups[0]["maximize"] = False
    assert functional.static_key() == key
    hash(key)


def test_group_added_in_mid_training() -> None:
    def only_matrices(p: list[torch.nn.Parameter]) -> Adam:
        return Adam([q for q in p if q.ndim == 2], lr=0.01)

    reference, ours = TorchSide(only_matrices, initial_values()), TorchSide(only_matrices, initial_values())
    functional = FunctionalSide(ours)
    key = functional.functional.static_key()
    for step in range(10):
        if step == 5:
            for side in (reference, ours):
                side.optimizer.add_param_group({"params": [side.params["conv"]], "lr": 0.1})
            assert functional.functional.static_key() != key
            functional.program.clear_cache()
        reference.step(noise(step))
        functional.step(noise(step))
    assert_close(functional.values(), reference.values(), TOLERANCE)
    np.testing.assert_array_equal(functional.values()["bias"], initial_values()["bias"])


def test_momentum_switched_on_in_mid_training() -> None:
    reference = TorchSide(lambda p: SGD(p, lr=0.1), initial_values())
    ours = FunctionalSide(TorchSide(lambda p: SGD(p, lr=0.1), initial_values()))
    for step in range(9):
        if step == 3:
            reference.optimizer.param_groups[0]["momentum"] = ours.optimizer.param_groups[0]["momentum"] = 0.9
            ours.program.clear_cache()
        reference.step(noise(step))
        ours.step(noise(step))
    assert_close(ours.values(), reference.values(), TOLERANCE)


def test_flag_that_needs_state_of_its_own_is_refused_in_mid_training() -> None:
    ours = FunctionalSide(TorchSide(lambda p: Adam(p, lr=0.1), initial_values()))
    ours.step(noise(0))
    ours.optimizer.param_groups[0]["amsgrad"] = True
    ours.program.clear_cache()
    with pytest.raises(ValueError, match=r"no 'max_exp_avg_sq'.*amsgrad"):
        ours.step(noise(1))


def test_frozen_parameter_has_no_state() -> None:
    side = TorchSide(lambda p: Adam(p, lr=0.1), initial_values())
    side.params["tall"].requires_grad_(False)
    functional = functional_form(side.optimizer, side.names)
    params = place(initial_values(), 1)
    assert set(functional.import_state(params)) == set(functional.init(params)) == set(SHAPES) - {"tall"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [SGD, AdamW, RMSprop])
def test_half_precision_state_and_parameters(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    """State in the parameter's dtype, as in torch; values within half-precision rounding of a float32 run."""
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9} if kind is not AdamW else {"lr": 0.01}
    side = TorchSide(lambda p: kind(p, **options), initial_values())
    for param in side.params.values():
        param.data = param.data.to(dtype)
    side.optimizer = kind(list(side.params.values()), **options)
    functional = functional_form(side.optimizer, side.names)
    jax_dtype = jnp.bfloat16 if dtype is torch.bfloat16 else jnp.float16
    params = {name: jnp.asarray(value, jax_dtype) for name, value in side.values().items()}
    state = functional.import_state(params)
    wide = TorchSide(lambda p: kind(p, **options), initial_values())
    update = jax.jit(functional.update)
    for step in range(10):
        grads = {name: (params[name] + jnp.asarray(value, jax_dtype)).astype(jax_dtype) for name, value in noise(step).items()}
        params, state = update(grads, state, params, functional.hyper())
        wide.step(noise(step))
    assert all(value.dtype == jax_dtype for value in params.values())
    assert all(leaf.dtype == (jnp.float32 if key == "step" else jax_dtype) for s in state.values() for key, leaf in s.items())
    found = {name: np.asarray(value, np.float32) for name, value in params.items()}
    assert_close(found, wide.values(), 10 * 2.0**-8 if dtype is torch.bfloat16 else 10 * 2.0**-11)
    functional.export_state(state)
    assert all(v.dtype == dtype for s in side.optimizer.state.values() for k, v in s.items() if k != "step")


@pytest.mark.parametrize("make", [
    lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1), lambda p: Adam(p, lr=0.01, amsgrad=True),
    lambda p: Adagrad(p, lr=0.1), lambda p: Rprop(p, lr=0.01), lambda p: ASGD(p, lr=0.1, t0=3),
    lambda p: RMSprop(p, lr=0.01, centered=True),
], ids=["SGD", "Adam", "Adagrad", "Rprop", "ASGD", "RMSprop"])  # fmt: skip
def test_complex_parameters(make: MakeOptimizer) -> None:
    rng = np.random.default_rng(0)
    values = {"z": (rng.standard_normal((4, 3)) + 1j * rng.standard_normal((4, 3))).astype(np.complex64)}
    reference = torch.nn.Parameter(torch.from_numpy(values["z"].copy()))
    optimizer = make([reference])
    mine = torch.nn.Parameter(torch.from_numpy(values["z"].copy()))
    functional = functional_form(make([mine]), {mine: "z"})
    params = {"z": jnp.asarray(values["z"])}
    state = functional.import_state(params)
    update = jax.jit(functional.update)
    for _ in range(20):
        push = (rng.standard_normal((4, 3)) + 1j * rng.standard_normal((4, 3))).astype(np.complex64)
        reference.grad = reference.detach() + torch.from_numpy(push)
        optimizer.step()
        params, state = update({"z": params["z"] + push}, state, params, functional.hyper())
    np.testing.assert_allclose(params["z"], reference.detach().numpy(), rtol=0, atol=TOLERANCE)
    exported = functional.export_state(state)["state"][0]
    for key, value in optimizer.state_dict()["state"][0].items():
        assert exported[key].dtype == value.dtype
        np.testing.assert_allclose(exported[key], value, rtol=0, atol=2 * TOLERANCE * max(1, float(value.abs().max())))


def test_double_precision_with_x64() -> None:
    with jax.enable_x64(True):
        values = {name: value.astype(np.float64) for name, value in initial_values().items()}
        reference, ours = (TorchSide(lambda p: RAdam(p, lr=0.01, weight_decay=0.1), values) for _ in range(2))
        functional = functional_form(ours.optimizer, ours.names)
        assert functional.hyper().dtype == np.float64
        params = {name: jnp.asarray(value) for name, value in values.items()}
        state = functional.import_state(params)
        update = jax.jit(functional.update)
        for step in range(50):
            reference.step(noise(step))
            grads = {name: params[name] + value for name, value in noise(step).items()}
            params, state = update(grads, state, params, functional.hyper())
        for name, param in reference.params.items():
            np.testing.assert_allclose(params[name], param.detach().numpy(), rtol=0, atol=1e-11)


def test_infinite_parameter_without_gradient_flow_stays_as_torch_has_it() -> None:
    """A mask kept as a parameter: -inf with a zero gradient must not become NaN."""
    values = {"mask": np.array([-math.inf, 0.0], np.float32)}
    for make in (lambda p: SGD(p, lr=0.1), lambda p: AdamW(p, lr=0.1, weight_decay=0.0)):
        mask = torch.nn.Parameter(torch.from_numpy(values["mask"].copy()))
        functional = functional_form(make([mask]), {mask: "mask"})
        params = {"mask": jnp.asarray(values["mask"])}
        new, _ = jax.jit(functional.update)({"mask": jnp.zeros(2)}, functional.import_state(params), params, functional.hyper())
        np.testing.assert_array_equal(new["mask"], values["mask"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: LBFGS(p),
            r"LBFGS cannot run inside a compiled step: it evaluates its closure.*AdamW.*XLATRAIN_EXECUTOR=eager",
        ),
        (lambda p: SparseAdam(p), r"SparseAdam cannot run inside a compiled step: it needs sparse gradients.*torch.optim.Adam "),
        (lambda p: Adam(p, differentiable=True), r"param_groups\[0\]\['differentiable'\] is True.*differentiable=False"),
    ],
)
def test_refused_by_name(make: MakeOptimizer, message: str) -> None:
    side = TorchSide(make, initial_values())
    with pytest.raises(UnsupportedOptimizerError, match=message):
        functional_form(side.optimizer, side.names)


def test_unknown_parameter_is_named() -> None:
    side = TorchSide(lambda p: SGD(p, lr=0.1), initial_values())
    names = {param: name for param, name in side.names.items() if name != "conv"}
    with pytest.raises(
        UnsupportedOptimizerError, match=r"param_groups\[0\]\['params'\]\[2\] \(shape \(8, 3, 2\), torch.float32\) is not a param"
    ):
        functional_form(side.optimizer, names)


def test_state_of_another_model_is_named() -> None:
    other = TorchSide(lambda p: Adam(p, lr=0.1), {**initial_values(), "wide": np.zeros((8, 23), np.float32)})
    other.step({**noise(0), "wide": np.zeros((8, 23), np.float32)})
    side = TorchSide(lambda p: Adam(p, lr=0.1), initial_values())
    side.optimizer.load_state_dict(other.optimizer.state_dict())
    functional = functional_form(side.optimizer, side.names)
    with pytest.raises(ValueError, match=r"parameter 'wide': 'exp_avg' has shape \(8, 23\), expected \(8, 24\)"):
        functional.import_state(place(initial_values(), 1))


def test_momentum_buffer_saved_as_none_is_no_state() -> None:
    side = TorchSide(lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5), initial_values())
    for param in side.params.values():
        side.optimizer.state[param]["momentum_buffer"] = None
    reference = TorchSide(lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5), initial_values())
    ours = FunctionalSide(side)
    for step in range(3):
        reference.step(noise(step))
        ours.step(noise(step))
    assert_close(ours.values(), reference.values(), TOLERANCE)


def test_imported_state_does_not_share_memory_with_torch() -> None:
    side = TorchSide(lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.25), initial_values())
    functional = functional_form(side.optimizer, side.names)
    state = functional.import_state(place(initial_values(), 1))
    side.optimizer.state[side.params["tall"]]["sum"].fill_(7.0)
    np.testing.assert_array_equal(state["tall"]["sum"], np.full((16, 8), 0.25, np.float32))


def test_notify_step_silences_the_schedulers_order_warning() -> None:
    side = TorchSide(lambda p: SGD(p, lr=0.1), initial_values())
    scheduler = torch.optim.lr_scheduler.StepLR(side.optimizer, 1)
    functional_form(side.optimizer, side.names).notify_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@pytest.mark.parametrize("kind", [SGD, type("OwnSGD", (SGD,), {})])
def test_step_post_hook_is_called_after_each_step(kind: type[SGD]) -> None:
    ours = FunctionalSide(TorchSide(lambda p: kind(p, lr=0.1), initial_values()))
    called = []
    ours.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: called.append(optimizer))
    for step in range(3):
        ours.step(noise(step))
    assert called == [ours.optimizer] * 3


def test_step_pre_hook_is_refused_whenever_it_comes() -> None:
    side = TorchSide(lambda p: SGD(p, lr=0.1), initial_values())
    functional = functional_form(side.optimizer, side.names)
    handle = side.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedOptimizerError, match=r"register_step_pre_hook.*on_before_optimizer_step"):
        functional.notify_step()
    with pytest.raises(UnsupportedOptimizerError, match=r"register_step_pre_hook.*on_before_optimizer_step"):
        functional_form(side.optimizer, side.names)
    handle.remove()
    functional.notify_step()


def test_an_unfrozen_parameter_gets_its_state_in_the_step() -> None:
    reference, mine = TorchSide(CASES["AdamW"], initial_values()), TorchSide(CASES["AdamW"], initial_values())
    mine.params["tall"].requires_grad_(False)
    ours = FunctionalSide(mine)
    for step in range(6):
        if step == 3:
            mine.params["tall"].requires_grad_(True)
            assert "tall" not in ours.state
        without = ["tall"] if step < 3 else []
        reference.step(noise(step), without)
        ours.step(noise(step), without)
    assert_close(ours.values(), reference.values(), TOLERANCE)
