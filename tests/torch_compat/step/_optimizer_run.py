"""The same noisy quadratic, minimised by a torch optimizer and by its functional form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_compat.step.optimizers.forms import functional_form
from xlatrain.mesh.mesh import make_mesh
from xlatrain.step.optimizers.by_parameter import state_shardings
from xlatrain.xla.compiler_options import compiler_options

Arrays = Mapping[str, np.ndarray]
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

SHAPES: dict[str, tuple[int, ...]] = {"tall": (16, 8), "wide": (8, 24), "conv": (8, 3, 2), "bias": (16,), "scale": ()}
MATRICES = {"tall": (16, 8), "wide": (8, 24)}


def initial_values(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def noise(step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, np.ndarray]:
    """A step's random part of the gradient; the whole gradient is the parameter plus this."""
    rng = np.random.default_rng(1000 + step)
    return {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}


class TorchSide:
    """Parameters and optimizer stepped by torch itself."""

    def __init__(self, make: MakeOptimizer, values: Arrays) -> None:
        self.params = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in values.items()}
        self.optimizer = make(list(self.params.values()))
        self.sign = -1.0 if self.optimizer.param_groups[0].get("maximize") else 1.0

    @property
    def names(self) -> dict[torch.Tensor, str]:
        return {param: name for name, param in self.params.items()}

    def step(self, noises: Arrays, without: Iterable[str] = ()) -> None:
        for name, param in self.params.items():
            value = self.sign * (param.detach() + torch.from_numpy(noises[name]).to(param.dtype))
            param.grad = None if name in without else value
        self.optimizer.step()

    def values(self) -> dict[str, np.ndarray]:
        return {name: param.detach().float().numpy().copy() for name, param in self.params.items()}


class FunctionalSide:
    """The functional form of an optimizer, its update jitted, on one device or on a mesh of several."""

    def __init__(self, side: TorchSide, n_devices: int = 1) -> None:
        self.optimizer = side.optimizer
        self.functional = functional_form(side.optimizer, side.names)
        self.names = list(side.params)
        self.params = place(side.values(), n_devices)
        self.state = self.functional.import_state(self.params)
        sign = side.sign

        def program(params: Any, state: Any, noises: Any, hyper: Any) -> Any:
            grads = {name: None if noises.get(name) is None else sign * (p + noises[name]) for name, p in params.items()}
            params, state = self.functional.update(grads, state, params, hyper)
            return params, _pin_unlike_parameters(state, self.params)

        # As the programs of a step are: XLA:CPU's other schedule starts collectives beside each other, and threads may lack.
        self.program = jax.jit(program, compiler_options=compiler_options(mesh_of(n_devices)))
        self.keys = {self.functional.static_key()}

    def step(self, noises: Arrays, without: Iterable[str] = ()) -> None:
        given = {name: None if name in without else value for name, value in noises.items()}
        if (key := self.functional.static_key()) not in self.keys:  # what a trainer does: another key, another program
            self.keys.add(key)
            self.program.clear_cache()
        self.params, self.state = self.program(self.params, self.state, given, self.functional.hyper())
        jax.block_until_ready((self.params, self.state))
        self.functional.notify_step()

    def values(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(self.params[name]) for name in self.names}  # jit gives dicts in sorted order


def _pin_unlike_parameters(state: Any, params: Mapping[str, jax.Array]) -> Any:
    """Pin what is not of its parameter's shape, as a compiled step does: the partitioner is free to split Adafactor's averages.

    State of a parameter's shape is left to the partitioner, which is to keep the parameter's own sharding.
    """
    pinned = state_shardings(state, params)
    return {
        name: {
            key: leaf if leaf.shape == params[name].shape else jax.lax.with_sharding_constraint(leaf, pinned[name][key])
            for key, leaf in leaves.items()
        }
        for name, leaves in state.items()
    }


def mesh_of(n_devices: int) -> Mesh:
    return make_mesh({"fsdp": n_devices}, jax.devices()[:n_devices])


def place(values: Arrays, n_devices: int) -> dict[str, jax.Array]:
    """Parameters on a mesh, dim 0 split where it can be; on one device, whole."""
    if n_devices == 1:
        return {name: jax.device_put(value, jax.devices()[0]) for name, value in values.items()}
    mesh = mesh_of(n_devices)
    specs = {name: PartitionSpec("fsdp") if value.ndim else PartitionSpec() for name, value in values.items()}
    return {name: jax.device_put(value, NamedSharding(mesh, specs[name])) for name, value in values.items()}


def assert_close(found: Arrays, expected: Arrays, tolerance: float) -> None:
    """Every array within ``tolerance`` of the larger of 1 and the largest expected magnitude."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        limit = tolerance * max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(found[name], value, rtol=0, atol=limit, err_msg=name)


def numpy_state(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, np.ndarray]:
    """The optimizer's state as ``name.key`` → array."""
    return {
        f"{names[param]}.{key}": value.detach().float().numpy()
        for param, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    }
