"""A run that needs more memory than a device has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.utils.data import DataLoader

from torch_compat import LightningModule, Trainer
from torch_compat.fabric import Fabric
from torch_compat.utilities.memory import is_oom_error
from xlatrain.mesh.mesh import make_mesh
from xlatrain.step.device_memory import OutOfDeviceMemory, Shortage
from xlatrain.step.engine import Engine

pytestmark = pytest.mark.usefixtures("compiled_as_for_users")


class Huge(LightningModule):
    """A step that makes a matrix of 256 TiB: more than addresses, for kernels that promise any memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.ones(1 << 23))
        self.narrow = torch.nn.Parameter(torch.ones(8, 3))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.linalg.cholesky(self.wide[:, None] * self.wide).sum() + self.narrow.sum() + batch.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def test_the_error_says_what_takes_memory_and_what_to_change() -> None:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Huge()
    with pytest.raises(OutOfDeviceMemory) as caught, pytest.warns(UserWarning, match="step that failed took the values of 2"):
        trainer.fit(module, DataLoader(torch.zeros(4, 2), 1))
    text = str(caught.value)
    assert "Out of memory allocating" in text and isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    lines = [line.strip() for line in text.split("contributors on a device:\n")[1].split("\n  What helps:")[0].splitlines()]
    assert len(lines) == 5
    assert lines[0].endswith("GiB  activations, gradients, gathered parameters and scratch of the program")
    assert float(lines[0].split()[0].replace(",", "")) >= 4096 * 64
    assert "32.00 MiB  parameter wide [8388608], whole on each device" in lines
    assert "strategy='fsdp': parameters, gradients and optimizer state are split over the 2 devices" in text
    assert "bf16-mixed" in text and "accumulate_grad_batches" in text and "remat" in text
    assert is_oom_error(caught.value)  # what the batch size finder looks for
    assert torch.equal(module.narrow.detach(), torch.ones(8, 3))  # the module is left as an ordinary one


class HugeModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.ones(1 << 23))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(self.wide[:, None] * self.wide).sum() + x.sum()


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "calls"])
def test_fabric_says_it_too(compiled: bool) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    module = HugeModule()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = fabric.compile(step) if compiled else step
    with pytest.raises(OutOfDeviceMemory) as caught:
        run(torch.zeros(4, 2))
    text = str(caught.value)
    assert "32.00 MiB  parameter wide [8388608], whole on each device" in text
    assert "strategy='fsdp'" in text and "fabric.backward" in text and "accumulate_grad_batches" not in text


def test_a_step_of_the_flax_engine_says_it_too() -> None:
    class Wide(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.wide = nnx.Param(jnp.ones(1 << 23))

    def loss(model: Wide, batch: jax.Array) -> jax.Array:
        wide = model.wide[...]
        return jnp.linalg.cholesky(wide[:, None] * wide).sum() + batch.sum()

    engine = Engine(Wide, optax.adam(1e-3), mesh=make_mesh({"data": 2}, devices=jax.devices()[:2]))
    with pytest.raises(OutOfDeviceMemory) as caught:
        engine.compile_train_step(loss)(engine.init(), np.zeros((4, 2), np.float32))
    text = str(caught.value)
    assert "optimizer state" in text and "mu" in text and "whole on each device" in text and "an fsdp axis" in text


def test_sizes_in_messages_of_compilers() -> None:
    def sizes(message: str) -> tuple[int, int | None, bool]:
        found = Shortage.from_error(RuntimeError(message))
        assert found is not None
        return found.wanted, found.available, found.compiling

    gib = 1 << 30
    tpu = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 27.50G of 15.75G hbm."
    assert sizes(tpu) == (27.5 * gib, 15.75 * gib, True)
    newer = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (27.50G) exceeds available HBM (15.75G)."
    assert sizes(newer) == (27.5 * gib, 15.75 * gib, True)
    assert sizes("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2048 bytes.") == (2048, None, False)
    assert sizes("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.") == (1.5 * gib, None, False)
    assert sizes("RESOURCE_EXHAUSTED: no more streams") == (0, None, False)
    assert Shortage.from_error(RuntimeError("INTERNAL: something else")) is None
