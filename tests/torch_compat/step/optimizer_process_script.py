"""Run by several processes: steps on a mesh that spans them, the state out to torch and back in, more steps."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

import xlatrain.cluster.distributed
from tests.torch_compat.step._optimizer_run import TorchSide, assert_close, initial_values, noise
from torch_compat.step.optimizers.forms import functional_form
from torch_compat.utilities.host_arrays import host_value, place
from xlatrain.mesh.mesh import make_mesh

SHAPES = {"weight": (8, 4), "bias": (8,)}


def make(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, amsgrad=True)


def main() -> None:
    xlatrain.cluster.distributed.initialize()
    sharding = NamedSharding(make_mesh({"fsdp": jax.device_count()}), PartitionSpec("fsdp"))
    reference, mine = TorchSide(make, initial_values(SHAPES)), TorchSide(make, initial_values(SHAPES))
    params = {name: place(value, sharding) for name, value in initial_values(SHAPES).items()}
    for first in (0, 5):  # the second time, from what was exported
        functional = functional_form(mine.optimizer, mine.names)
        state = functional.import_state(params)
        update = jax.jit(functional.update)
        for step in range(first, first + 5):
            reference.step(noise(step, SHAPES))
            grads = {name: params[name] + place(value, sharding) for name, value in noise(step, SHAPES).items()}
            params, state = update(grads, state, params, functional.hyper())
        assert not state["weight"]["exp_avg"].is_fully_addressable
        functional.export_state(state)
    assert_close({name: host_value(value) for name, value in params.items()}, reference.values(), 5e-6)
    exported, expected = mine.optimizer.state_dict()["state"], reference.optimizer.state_dict()["state"]
    for index, entries in expected.items():
        for key, value in entries.items():
            np.testing.assert_allclose(exported[index][key], value, rtol=0, atol=1e-5)
    Path(sys.argv[1], f"done-{jax.process_index()}").touch()


if __name__ == "__main__":
    main()
