"""Modules made in ``configure_model``: born on the mesh, trained, saved and continued there, never whole on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import ModelCheckpoint
from torch_compat.strategies import FSDPStrategy
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.bridge.lazy_init import is_deferred, operand_of
from xlatrain.host.host_memory import LIMIT_VARIABLE
from xlatrain.init import PretrainedMismatchError

NOTHING_WHOLE = str(1 << 20)  # bytes: less than the large parameter, more than the small ones


class Born(LightningModule):
    def __init__(self, weights: Path | None = None) -> None:
        super().__init__()
        self.weights = weights
        self.net: Any = None
        self.losses: list[float] = []
        self.placed_with_values = True

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(8, 640), nn.BatchNorm1d(640), nn.ReLU(), nn.Linear(640, 640), nn.Linear(640, 1))
            self.placed_with_values = not is_deferred(self.net[3].weight)
            if self.weights is not None:
                self.trainer.strategy.load_pretrained(self.net, self.weights, names={"model.": ""})

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", ((self.net(batch[0]) - batch[1]) ** 2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(devices: int, strategy: Any, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=10, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **{"enable_checkpointing": False, **options},
    )  # fmt: skip


def loader(devices: int) -> DataLoader:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16 // devices)


def fit(module: Born, devices: int, strategy: Any, max_steps: int, *, resume: Path | None = None, seed: int = 5) -> Trainer:
    torch.manual_seed(seed)
    run = trainer(devices, strategy, max_steps=max_steps)
    run.fit(module, loader(devices), ckpt_path=resume)
    return run


@pytest.fixture(scope="module")
def alone() -> Born:
    """Six steps on one device."""
    module = Born()
    fit(module, 1, "auto", 6)
    return module


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_is_that_of_one_device(strategy: str, alone: Born) -> None:
    module = Born()
    fit(module, 8, strategy, 6)
    assert not module.placed_with_values
    np.testing.assert_allclose(module.losses, alone.losses, rtol=2e-5)
    for (name, parameter), expected in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert type(parameter) is nn.Parameter
        if name != "net.0.bias":  # in front of BatchNorm: its gradient is rounding noise, which Adam scales up
            torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)


def test_what_is_on_a_mesh_is_not_born_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the record of how it was made is still there: only the collector finds it, at some later time."""

    class Recorded(Born):
        def configure_model(self) -> None:
            super().configure_model()
            self.__dict__.setdefault("records", [operand_of(parameter) for parameter in self.net.parameters()])

    monkeypatch.setenv(LIMIT_VARIABLE, NOTHING_WHOLE)
    first = Recorded()
    run = fit(first, 8, "fsdp", 1)
    (expected,) = run.test(first, loader(8), verbose=False)
    kind = type(first.net[3].weight)
    fit(Born(), 8, "fsdp", 1)
    assert all(first.__dict__["records"])
    assert type(first.net[3].weight) is kind
    assert run.test(first, loader(8), verbose=False) == [expected]


@pytest.mark.slow
def test_saved_on_one_mesh_and_continued_on_another_without_being_whole_anywhere(
    tmp_path: Path, alone: Born, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, NOTHING_WHOLE)
    first = Born()
    run = fit(first, 8, "fsdp", 3)
    large = first.net[3].weight
    assert large.shape == (640, 640)
    assert {name: tuple(value.shape) for name, value in first.state_dict().items()}["net.3.weight"] == (640, 640)
    assert isinstance(large, nn.Parameter)
    with pytest.raises(MemoryError, match=r"'net.3.weight' of shape \(640, 640\).*XLATRAIN_HOST_MEMORY"):
        large.sum()
    assert all(torch.isfinite(parameter).all() for parameter in first.parameters() if parameter is not large)
    run.save_checkpoint(tmp_path / "three.ckpt", weights_only=True)
    weights_after_fit = tmp_path / "three.ckpt"

    saved = Born()
    torch.manual_seed(5)
    callback = ModelCheckpoint(tmp_path, "state", every_n_train_steps=3)
    trainer(8, "fsdp", max_steps=3, callbacks=[callback], enable_checkpointing=True).fit(saved, loader(8))
    continued = Born()
    fit(continued, 4, FSDPStrategy(), 6, resume=tmp_path / "state.ckpt", seed=77)
    np.testing.assert_allclose(saved.losses + continued.losses, alone.losses, rtol=5e-5)

    tested = Born()
    (result,) = trainer(2, "fsdp").test(tested, loader(2), ckpt_path=weights_after_fit, verbose=False)
    (expected,) = run.test(first, loader(8), verbose=False)  # the module that stayed on its mesh
    assert result["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-5)

    monkeypatch.delenv(LIMIT_VARIABLE)
    np.testing.assert_allclose(large.sum().item(), saved.net[3].weight.sum().item(), rtol=1e-6)
    stored = torch.zeros(640, 640)
    first.load_state_dict({**first.state_dict(), "net.3.weight": stored})
    assert torch.equal(first.net[3].weight, stored)


class TiedTwice(Born):
    """Input and output embedding share their weight, and the output layer is also called ``decoder``."""

    def configure_model(self) -> None:
        self.net = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.net.weight
        self.decoder = self.head

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return (self.head(batch[0]) + self.net.weight[0] - batch[1]).square().mean()


def test_a_tied_layer_under_two_names() -> None:
    module = TiedTwice()
    fit(module, 1, "auto", 2)  # the second step looks at the module that the first capture left behind
    assert module.head.weight is module.decoder.weight is module.net.weight
    assert type(module.net.weight) is nn.Parameter
    assert [name for name, _ in module.named_parameters()] == ["net.weight"]
    assert module.losses[1] < module.losses[0]


def test_init_module(alone: Born) -> None:
    run = trainer(8, "fsdp", max_steps=1, precision="bf16-true")
    with run.init_module():
        module = Born()
        module.net = nn.Sequential(nn.Linear(8, 640), nn.Linear(640, 640), nn.Linear(640, 1))
    assert is_deferred(module.net[1].weight)
    assert module.net[1].weight.dtype == torch.bfloat16
    with run.init_module(empty_init=True):
        empty = nn.Linear(640, 640)
    run.fit(module, loader(8))
    assert np.isfinite(module.losses).all()
    assert (empty.weight == 0).all()


def test_pretrained_weights(tmp_path: Path) -> None:
    source = Born()
    source.configure_model()
    state = {f"model.{name}": value.clone().contiguous() for name, value in source.net.state_dict().items()}
    save_file({name: v.bfloat16() if v.is_floating_point() else v for name, v in state.items()}, tmp_path / "model.safetensors")
    module = Born(tmp_path)
    trainer(8, "fsdp").test(module, loader(8), verbose=False)
    for (name, value), loaded in zip(source.net.named_parameters(), module.net.parameters(), strict=True):
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, value.bfloat16().float()), name

    state["model.0.weight"] = torch.zeros(3, 3)
    state["model.extra"] = state.pop("model.4.bias")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(PretrainedMismatchError) as raised:
        trainer(8, "fsdp").test(Born(tmp_path), loader(8), verbose=False)
    message = str(raised.value)
    for part in ("missing: 4.bias", "unexpected: extra (stored as model.extra)", "wrong shape: 0.weight", "expected (640, 8)"):
        assert part in message


class FromFiles(Born):
    """Layers whose constructors read their weights, one after the other."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.on_host: list[int] = []

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 640))
        for path in sorted(self.folder.glob("*.npy")):
            layer = nn.Linear(1, 1, bias=False)
            layer.weight = nn.Parameter(torch.from_numpy(np.load(path)))
            layer.weight.data.mul_(2)
            self.net.append(layer)
            self.on_host.append(sum(not is_deferred(part.weight) for part in self.net))
        self.net.append(nn.Linear(640, 1))


def test_parameters_from_files_are_on_the_host_one_at_a_time(tmp_path: Path) -> None:
    stored = [np.random.default_rng(i).normal(size=(640, 640)).astype(np.float32) / 40 for i in range(3)]
    for i, values in enumerate(stored):
        np.save(tmp_path / f"{i}.npy", values)
    module = FromFiles(tmp_path)
    trainer(8, "fsdp").test(module, loader(8), verbose=False)
    assert module.on_host == [1, 1, 1]
    for i, values in enumerate(stored):
        np.testing.assert_array_equal(module.net[1 + i].weight.detach().numpy(), values * 2)


def test_eager_steps_are_refused_where_the_model_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branches(Born):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if loss.detach().numpy() > 0 else -loss

    monkeypatch.setenv(LIMIT_VARIABLE, NOTHING_WHOLE)
    module = Branches()
    with pytest.raises(MisconfigurationException, match=r"test_born_sharded\.py:\d+(.|\n)*does not fit there\. Make"):
        fit(module, 2, FSDPStrategy(), 1)
