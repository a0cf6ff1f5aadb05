"""``offload="optimizer"``: its state in host memory; the same numbers, checkpoints, and what does not go together with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.fabric import Fabric
from torch_compat.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from torch_compat.plugins import MixedPrecision
from torch_compat.preflight.finder import find_steps
from torch_compat.strategies import FSDPStrategy, MeshStrategy
from torch_compat.utilities.exceptions import MisconfigurationException

DEPTH = 4


class Small(LightningModule):
    """Equal layers, which run as a loop where ``XLATRAIN_ROLL_LAYERS`` says so, and a parameter without a gradient."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.optimizer, self.kinds = optimizer, set[str]()
        self.layers, self.unused = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEPTH)), nn.Parameter(torch.zeros(8))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.automatic_optimization:
            return self(batch[0])
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self(batch[0])
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x**2).mean()

    def seen(self, opt_state: Any) -> None:
        leaves = jax.tree.leaves(opt_state)
        self.kinds |= {leaf.sharding.memory_kind for leaf in leaves if leaf.ndim > 1}

    def on_train_batch_end(self, *_: Any) -> None:
        placed = self.trainer.strategy.placed
        assert placed is not None
        self.seen(placed.raw_state.opt_state)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=1e-2)


def fit(module: Small, strategy: Any, epochs: int = 2, ckpt_path: Path | None = None, **options: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu", devices=4, strategy=strategy, max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.linspace(-1, 1, 96).view(12, 8)), 1), ckpt_path=ckpt_path)
    return trainer


def made(**options: Any) -> Small:
    torch.manual_seed(0)
    return Small(**options)


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["off", "3"], ids=["unrolled", "as a loop"])
def test_the_numbers_are_those_of_state_on_the_devices(layers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", layers)
    on_devices, on_host, resumed = made(), made(), made()
    fit(on_devices, FSDPStrategy(), epochs=3, gradient_clip_val=0.1)
    strategy = FSDPStrategy(offload="optimizer", offload_activations=["layers.*"])
    trainer = fit(on_host, strategy, gradient_clip_val=0.1)
    assert on_devices.kinds == {"device"}
    assert on_host.kinds == {"pinned_host"}
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    other_mesh = MeshStrategy({"data": 2, "fsdp": 2}, min_size=1, offload="optimizer")
    fit(resumed, other_mesh, epochs=3, ckpt_path=tmp_path / "x.ckpt", gradient_clip_val=0.1)
    same_parameters(on_devices, resumed)


def same_parameters(one: nn.Module, other: nn.Module) -> None:
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=2e-6, atol=2e-7)


def test_manual_optimization() -> None:
    on_devices, on_host = made(manual=True), made(manual=True)
    fit(on_devices, FSDPStrategy(), epochs=1)
    fit(on_host, FSDPStrategy(offload="optimizer", offload_activations=["layers.*"]), epochs=1)
    assert (on_devices.kinds, on_host.kinds) == ({"device"}, {"pinned_host"})
    same_parameters(on_devices, on_host)


def test_fabric() -> None:
    """Calls of Fabric, which the host steps, and a compiled function."""

    def trained(compiled: bool, **options: Any) -> Small:
        fabric, module = Fabric(accelerator="cpu", devices=4, strategy=FabricFSDPStrategy(**options)), made()
        fabric.launch()
        model, optimizer = fabric.setup(module, module.configure_optimizers())

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            fabric.backward(model(x))
            optimizer.step()

        run = fabric.compile(step) if compiled else step
        for _ in range(3):
            run(torch.linspace(-1, 1, 32).view(4, 8))
            assert fabric._model.placed is not None
            module.seen(fabric._model.placed.raw_state.opt_state)
        fabric._model.release()
        return module

    expected = trained(True)
    for compiled in (True, False):
        found = trained(compiled, offload="optimizer", offload_activations=["layers.*"])
        assert (expected.kinds, found.kinds) == ({"device"}, {"pinned_host"})
        same_parameters(expected, found)


def test_activations_in_the_program() -> None:
    """Saved activations are in host memory, of layers that are computed again their inputs alone: one array out of a loop."""

    def on_host(strategy: Any) -> list[str]:
        trainer = Trainer(accelerator="cpu", devices=4, strategy=strategy, max_steps=1, logger=False)
        data = DataLoader(TensorDataset(torch.zeros(32, 8)), 2)
        step = find_steps(trainer, made(), data, None, None, evaluation=False).steps[0]
        return re.findall(r"f32<host>(\[[\d,]*\])", str(step.program.trace(*step.args).jaxpr))  # JAX drops it for CPUs

    layers: Any = {"offload_activations": ["layers.*"]}
    assert on_host(MeshStrategy()) == []
    later = DEPTH - 1  # the first layer's input is the batch, which stays
    assert f"[{later},8,8]" in on_host(FSDPStrategy(**layers))
    assert f"[{later},8,8]" in on_host(MeshStrategy(remat=["layers.*"], **layers))
    with pytest.raises(ValueError, match=r"offload_activations pattern 'layer.\*' matches no module of Small"):
        on_host(MeshStrategy(offload_activations=["layer.*"]))


class Own(torch.optim.Adam):
    """A subclass, which is captured as it is."""


@pytest.mark.parametrize(
    ("options", "trainer", "words"),
    [
        ({"optimizer": Own}, {}, "use an optimizer of torch.optim itself"),
        ({}, {"plugins": MixedPrecision("16-mixed", "cpu")}, "use 'bf16-mixed'"),
    ],
    ids=["captured", "scaled"],
)
def test_what_it_does_not_go_together_with(options: dict[str, Any], trainer: dict[str, Any], words: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"offload='optimizer'.*{words}"):
        fit(made(**options), FSDPStrategy(offload="optimizer"), **trainer)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="offload='activations'; expected 'optimizer'"):
        MeshStrategy(offload="activations")  # pyright: ignore[reportArgumentType]
    with pytest.raises(MisconfigurationException, match=r"cpu_offload=…\) is not supported.*offload='optimizer'"):
        FSDPStrategy(cpu_offload=True)
    with pytest.raises(ValueError, match=r"remat=\[3\]; expected a list of globs over module paths"):
        MeshStrategy({"data": 8}, remat=[3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"offload_activations='layers.\*'; expected a list of globs"):
        FSDPStrategy(offload_activations="layers.*")
    FSDPStrategy(cpu_offload=CPUOffload(offload_params=False))
