"""A torch module whose parameters and buffers live on a mesh, and the gradients that hooks see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from torch_compat.step.gradients import VisibleGradients
from torch_compat.step.model_state import ModelState
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import ShardingRules


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.tied = self.head


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return make_mesh({"fsdp": devices}, jax.devices()[:devices])


@pytest.fixture(params=[1, 8])
def state(request: pytest.FixtureRequest) -> ModelState:
    torch.manual_seed(0)
    return ModelState(Net(), mesh_of(request.param), ShardingRules(min_size=64), seed=2**40 + 5)


def test_parameters_keep_their_identity_and_values(state: ModelState) -> None:
    module = state.module
    weight = module.layer.weight
    expected = {name: tensor.detach().clone() for name, tensor in module.state_dict().items() if "tied" not in name}
    assert weight is state.params["layer.weight"]
    assert isinstance(weight, torch.nn.Parameter)
    assert set(state.state.params) | set(state.state.buffers) == set(expected)  # a tied module counts once
    for name, tensor in expected.items():
        array = state.array(name)
        assert array.dtype == {torch.bfloat16: jnp.bfloat16, torch.int64: jnp.int32}.get(tensor.dtype, jnp.float32)
        np.testing.assert_array_equal(np.asarray(array, np.float32), tensor.float())
    state.release(to_host=True)
    assert module.layer.weight is weight
    assert type(weight) is torch.nn.Parameter


def test_large_parameters_are_split_small_ones_whole() -> None:
    state = ModelState(Net(), mesh_of(8), ShardingRules(min_size=64), seed=0)
    assert not state.array("layer.weight").sharding.is_fully_replicated
    assert state.array("layer.bias").sharding.is_fully_replicated
    assert state.array("norm.running_mean").sharding.is_fully_replicated


def test_what_a_program_returns_shows_in_the_parameter(state: ModelState) -> None:
    doubled = {name: 2 * array for name, array in state.state.params.items()}
    before = state.params["layer.weight"].detach().clone()
    state.advance(replace(state.state, params=doubled))
    torch.testing.assert_close(state.params["layer.weight"].detach(), 2 * before)
    state.release(to_host=True)
    torch.testing.assert_close(state.module.layer.weight.detach(), 2 * before)


def test_what_user_code_writes_goes_to_the_mesh(state: ModelState) -> None:
    sharding = state.array("layer.weight").sharding
    with torch.no_grad():
        state.module.layer.weight.mul_(0).add_(3)
        state.module.norm.running_mean += 1
    state.push_writes()
    assert np.unique(np.asarray(state.array("layer.weight"))).tolist() == [3.0]
    assert np.unique(np.asarray(state.array("norm.running_mean"))).tolist() == [1.0]
    assert state.array("layer.weight").sharding.is_equivalent_to(sharding, 2)


def test_what_is_only_read_is_not_placed_again(state: ModelState) -> None:
    array = state.array("layer.weight")
    assert state.module.layer.weight.sum().isfinite()
    state.push_writes()
    assert state.array("layer.weight") is array


def test_a_write_of_another_shape_is_refused_by_name(state: ModelState) -> None:
    with pytest.raises(ValueError, match=r"'layer.bias' has shape \(8,\) on the mesh, but was given \(4,\)"):
        state.write("layer.bias", np.zeros(4, np.float32))


def test_streams_start_at_the_seed_and_continue_where_they_were(state: ModelState) -> None:
    assert np.asarray(state.state.key).tolist() == [2**8, 5]  # both halves of the seed
    assert int(state.state.draws) == 0
    state.set_streams([3, 4], 17)
    assert (np.asarray(state.state.key).tolist(), int(state.state.draws)) == ([3, 4], 17)


def test_gradients_used_up_in_a_program_are_there_without_values(state: ModelState) -> None:
    layer: Any = state.module.layer
    assert layer.weight.grad is None
    state.gradients.differentiated = frozenset({"layer.weight"})
    assert layer.weight.grad.shape == (8, 16) and layer.bias.grad is None
    with pytest.raises(RuntimeError, match=r"gradient of 'layer.weight' was used after the update.*on_after_backward"):
        layer.weight.grad.sum()
    torch.optim.SGD(state.module.parameters(), 0.1).zero_grad()
    assert layer.weight.grad is None


def test_gradients_that_hooks_see(state: ModelState) -> None:
    grads = {"layer.weight": jnp.ones((8, 16)), "layer.bias": None}
    state.gradients.shown = VisibleGradients(grads, state.state.params, {})
    assert state.module.layer.weight.grad.unique().tolist() == [1.0]
    assert state.module.layer.bias.grad is None


def test_frozen_parameters_are_told_by_their_flags(state: ModelState) -> None:
    assert all(state.requires_grad())
    seen = state.live.forms_changed
    state.module.layer.bias.requires_grad_(False)
    assert state.live.forms_changed != seen
    assert dict(zip(state.params, state.requires_grad(), strict=True))["layer.bias"] is False


def test_optimizer_state_is_split_like_its_parameter() -> None:
    state = ModelState(Net(), mesh_of(8), ShardingRules(min_size=64), seed=0)
    state.add_optimizer(lambda params: {name: {"momentum": 0 * array, "step": jnp.zeros(())} for name, array in params.items()})
    weight = state.state.opt_state["layer.weight"]
    assert weight["momentum"].sharding.is_equivalent_to(state.array("layer.weight").sharding, 2)
    assert weight["step"].sharding.is_fully_replicated
    state.load_optimizer(lambda params: {"layer.weight": {"momentum": np.ones((8, 16), np.float32)}})
    loaded = state.state.opt_state["layer.weight"]["momentum"]
    assert loaded.sharding.is_equivalent_to(state.array("layer.weight").sharding, 2)
    assert float(loaded.sum()) == 128


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (torch.nn.LazyLinear(3), "'weight' is not initialised yet"),
        (torch.nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
    ],
)
def test_parameters_without_values_are_named(module: torch.nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelState(module, mesh_of(1), ShardingRules(), seed=0)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def gradients() -> VisibleGradients:
    sharding = jax.sharding.NamedSharding(mesh_of(8), P("fsdp"))
    params = {"a": jax.device_put(jnp.zeros((8, 2)), sharding), "b": jnp.zeros(3, jnp.bfloat16), "c": jnp.zeros(2)}
    arrays = {"a": jax.device_put(jnp.full((8, 2), 2.0), sharding), "b": jnp.ones(3, jnp.bfloat16), "c": None}
    return VisibleGradients(arrays, params, {})


def test_gradients_that_nobody_looks_at_stay_where_they_are(gradients: VisibleGradients) -> None:
    left = gradients.arrays()
    assert left["a"] is not None and float(left["a"].sum()) == 32
    assert left["c"] is None


def test_the_same_tensor_is_shown_until_the_update(gradients: VisibleGradients) -> None:
    shown = gradients.read("a")
    assert shown is not None and gradients.read("a") is shown
    shown *= 0.5
    changed = gradients.arrays()["a"]
    assert changed is not None
    assert changed.sharding.spec == P("fsdp")
    assert float(changed.sum()) == 16


def test_a_gradient_that_is_only_read_is_not_placed_again(gradients: VisibleGradients) -> None:
    gradients.read("b")
    before = gradients.arrays()["b"]
    gradients.read("b")
    assert gradients.arrays()["b"] is before


def test_gradients_are_set_and_removed(gradients: VisibleGradients) -> None:
    gradients.set("a", None)
    gradients.set("c", torch.tensor([1.0, 2.0]))
    gradients.set("b", torch.tensor([0.5, 0.5, 0.5]))
    assert gradients.read("a") is None
    left = gradients.arrays()
    assert left["a"] is None
    assert left["b"] is not None and left["b"].dtype == jnp.bfloat16  # that of the parameter
    assert left["c"] is not None and left["c"].tolist() == [1.0, 2.0]
