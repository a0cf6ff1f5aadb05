"""Random numbers that torch draws for compiled steps: resumes, steps that end eagerly, and runs in which the program draws."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_compat as pl
from xlatrain.bridge import host_draws


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))
        self.losses: list[Any] = []
        self.places: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.net(batch[0] + torch.randn_like(batch[0])), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.places.append(torch.get_rng_state())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader() -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), batch_size=4, shuffle=True)


def trainer(tmp_path: Path, devices: int = 1, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=devices, default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **{"max_epochs": 2, **options},
    )  # fmt: skip


def fitted(model: Model, run: pl.Trainer, **options: Any) -> Model:
    torch.manual_seed(1)
    model.load_state_dict(Model().state_dict())
    torch.manual_seed(2)
    run.fit(model, loader(), **options)
    return model


def same_places(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("step", [3, 6, 8])
def test_a_resumed_run_draws_what_it_would_have_drawn(step: int, tmp_path: Path) -> None:
    class Saves(Model):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            if self.global_step == step:
                self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    whole = fitted(Saves(), trainer(tmp_path))
    resumed = Model()
    torch.manual_seed(99)
    trainer(tmp_path).fit(resumed, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert resumed.losses == whole.losses[step:]
    assert same_places(resumed.places, whole.places[step:])
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)


def test_steps_that_end_eagerly_draw_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails at the first batch, or later, has drawn nothing."""

    class Branches(Model):
        eager_from = 3

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx >= self.eager_from:
                torch.from_numpy(loss.detach().numpy())
            return loss + F.dropout(loss, 0.5)

    class AtOnce(Branches):
        eager_from = 0

    monkeypatch.setenv("XLATRAIN_EXECUTOR", "auto")
    found = [fitted(kind(), trainer(tmp_path, max_epochs=1)) for kind in (Branches, AtOnce)]
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    eager = fitted(Branches(), trainer(tmp_path, max_epochs=1))
    for one in found:
        assert same_places(one.places, eager.places)
        assert one.losses == pytest.approx(eager.losses, rel=1e-4)


def test_outcomes_that_were_assumed_wrongly_draw_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if (F.dropout(torch.ones(2), 0.5).sum() > 1).item():
                loss = loss + F.dropout(self.net(batch[0]), 0.1).square().mean()
            return loss

    found = fitted(Asks(), trainer(tmp_path))
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    eager = fitted(Asks(), trainer(tmp_path))
    assert same_places(found.places, eager.places)
    assert found.losses == pytest.approx(eager.losses, rel=1e-4)


def test_steps_that_differ_only_in_where_the_generator_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forks(Model):
        forks = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]) if self.forks else contextlib.nullcontext():
                scale = torch.rand(3).sum()
            return super().training_step(batch, batch_idx) * scale

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.forks = batch_idx % 2 == 1

    found = fitted(Forks(), trainer(tmp_path))
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    eager = fitted(Forks(), trainer(tmp_path))
    assert same_places(found.places, eager.places)
    assert found.losses == pytest.approx(eager.losses, rel=1e-4)


def test_meshes_and_steps_of_too_many_numbers_draw_in_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet(Model):
        """Its generator is moved by the loader alone."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.mse_loss(self.net(batch[0]), batch[1])

    places = fitted(Quiet(), trainer(tmp_path, 2, max_epochs=1)).places
    assert all(torch.equal(one, places[0]) for one in places)
    monkeypatch.setattr(host_draws, "MOST_BYTES", 10)
    places = fitted(Quiet(), trainer(tmp_path, max_epochs=1)).places
    assert all(torch.equal(one, places[0]) for one in places)
