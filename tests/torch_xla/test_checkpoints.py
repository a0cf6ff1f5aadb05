"""Checkpoints of the torch-xla path are the directories that every strategy writes: runs go from one to the other and on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jax.sharding import PartitionSpec

import torch_compat as pl
from tests.torch_xla.test_many_devices import SPLIT, Layouts
from tests.torch_xla.training import Net, difference, loader, make, plain_training, trainer
from torch_compat.strategies import FSDPStrategy, MeshStrategy, XLAFSDPStrategy, XLAStrategy
from xlatrain import checkpoint as sharded


class SaveFirstEpoch(pl.Callback):
    """Saves after the last batch of the first epoch, while everything is on the devices."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def xla() -> Any:
    return XLAFSDPStrategy()


def compiled() -> Any:
    return FSDPStrategy()


def xla_on_two_axes() -> Any:
    return XLAStrategy(axes={"data": 2, "fsdp": 2}, rules=[("blocks.0.weight", PartitionSpec(None, "fsdp"))])


@pytest.mark.parametrize(("saves", "resumes"), [(xla, compiled), (compiled, xla), (xla, xla_on_two_axes)])
def test_a_run_goes_on_elsewhere(saves: Any, resumes: Any, tmp_path: Path) -> None:
    reference = make()
    expected = plain_training(reference, epochs=2, clip=0.5)
    path = tmp_path / "first.ckpt"
    trainer(saves(), 4, max_epochs=1, gradient_clip_val=0.5, callbacks=[SaveFirstEpoch(path)]).fit(make(), loader(4))
    module, layouts = make(), Layouts()
    callbacks = [] if resumes is compiled else [layouts]
    run = trainer(resumes(), 4, gradient_clip_val=0.5, callbacks=callbacks)
    run.fit(module, loader(4), ckpt_path=path)
    assert run.global_step == 6
    assert module.values() == pytest.approx(expected[3:], abs=2e-6)
    assert difference(module, reference) < 1e-5
    if resumes is xla:
        assert layouts.state["blocks.0.weight"] == {"exp_avg": SPLIT, "exp_avg_sq": SPLIT}
    if saves is xla:
        stored = sharded.open_checkpoint(path).array_metadata()
        shapes = {tuple(one.shape): one for one in stored.values()}
        assert (16, 8) in shapes, "the weight of the first block is stored as an array"
        loaded = Net.load_from_checkpoint(path)
        assert all(p.device.type == "cpu" for p in loaded.parameters())


class Sharded(pl.LightningModule):
    """Makes its layers in ``configure_model``; a weight of two megabytes, which a program of its own computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, torch.Tensor] = {}

    def configure_model(self) -> None:
        self.big = torch.nn.Linear(512, 1024)
        torch.nn.init.trunc_normal_(self.big.weight, std=0.02)
        self.tied = torch.nn.Linear(512, 1024, bias=False)
        self.tied.weight = self.big.weight
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def on_fit_start(self) -> None:
        self.first = {name: value.detach().cpu().clone() for name, value in [*self.named_parameters(), *self.named_buffers()]}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].repeat(1, 64)
        return (self.big(x) - self.tied(x)).square().mean() * self.scale.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_parameters_are_born_on_their_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """With JAX's values; a module that is larger than the host stays on the devices, and the next run goes on with it."""
    values, layouts = {}, Layouts()
    for strategy, callbacks in ((MeshStrategy({"fsdp": 4}), []), (XLAFSDPStrategy(), [layouts])):
        module = Sharded()
        if callbacks:
            monkeypatch.setenv("XLATRAIN_HOST_MEMORY", "1000000")  # bytes; the weight has two million
        torch.manual_seed(3)
        trainer(strategy, 4, max_epochs=1, limit_train_batches=1, callbacks=callbacks).fit(module, loader(4))
        values[type(strategy)] = module.first
        assert module.big.weight is module.tied.weight
    assert layouts.params == {"big.weight": SPLIT, "big.bias": "{devices=[4]0,1,2,3}"}
    ours, compiled_values = values[XLAFSDPStrategy], values[MeshStrategy]
    assert list(ours) == list(compiled_values) == ["big.weight", "big.bias", "scale"]
    assert all(torch.equal(ours[name], compiled_values[name]) for name in ours)
    assert module.big.weight.device.type == "xla"
    first = module.first["big.weight"]
    trainer(XLAFSDPStrategy(), 4, max_epochs=1, limit_train_batches=1).fit(module, loader(4))
    assert not torch.equal(module.first["big.weight"], first)
    assert 0.019 < float(ours["big.weight"].std()) < 0.021


class Failing(Net):
    """The second batch fails, once."""

    failed = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and not self.failed:
            self.failed = True
            raise ValueError("the user's own")
        return loss


def test_a_run_that_failed_leaves_a_module_that_trains() -> None:
    module = make(Failing)
    with pytest.raises(ValueError, match="the user's own"):
        trainer("torch_xla", 4).fit(module, loader(4))
    module.losses.clear()
    trainer("torch_xla", 4, max_epochs=1).fit(module, loader(4))
    assert len(module.values()) == 3
    assert next(module.parameters()).device.type == "cpu"
