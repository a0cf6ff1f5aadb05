"""Gradients that are not finite are named, and kept away from the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import torch_compat as pl
from torch_compat.callbacks.non_finite_guard import NonFiniteError, NonFiniteGuard
from torch_compat.utilities.exceptions import MisconfigurationException

ROWS = 16


class Model(pl.LightningModule):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.layer = torch.nn.Linear(4, 1)
        self.unused = torch.nn.Linear(2, 2)
        self._optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(self.norm(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return self._optimizer([parameter for name, parameter in self.named_parameters() if "unused" not in name])


class SeesGradients(Model):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.layer.weight.grad is not None


def batches(bad: Sequence[int], *, without: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(ROWS, 4, generator=generator) for _ in range(6)]
    for index in bad:
        made[index][0, 0] = float("nan")
    return [[batch] for index, batch in enumerate(made) if not (without and index in bad)]


def fit(model: pl.LightningModule, data: list[Any], guard: NonFiniteGuard | None, **options: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    options = {"devices": 8, "strategy": "fsdp", **options}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[guard] if guard else [], **quiet, **options)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat([b[0] for b in data])), batch_size=ROWS // 8)
    trainer.fit(model, loader)
    return trainer


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "optimizer", "bad"), [(Model, adam, (2, 3)), (Model, momentum, (0, 4)), (SeesGradients, adam, (2,))]
)
def test_a_skipped_step_changes_nothing(kind: type[Model], optimizer: Any, bad: tuple[int, ...]) -> None:
    guard = NonFiniteGuard("skip")
    states = []
    for data, callback in ((batches(bad), guard), (batches(bad, without=True), None)):
        torch.manual_seed(5)
        model = kind(optimizer)
        if callback is None:
            fit(model, data, None)
        else:
            with pytest.warns(UserWarning, match=r"are not finite: those of .*layer\.weight.*; it was skipped"):
                fit(model, data, callback)
        states.append(model.state_dict())
    assert guard.total_notfinite == len(bad)
    for name, value in states[1].items():
        assert torch.isfinite(states[0][name]).all(), name
        torch.testing.assert_close(states[0][name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_stop_names_the_step_and_leaves_the_weights_finite() -> None:
    model = Model(adam)
    with pytest.raises(
        NonFiniteError, match=r"gradients of optimizer step 3 \(epoch 0, batch 2\) are not finite: those of norm\.weight"
    ):
        fit(model, batches([2]), NonFiniteGuard())
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_warn_takes_the_step_and_many_skips_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_NON_FINITE", "warn")
    model = Model(adam)
    with pytest.warns(UserWarning, match=r"optimizer step 6 .*; it was taken \(1 in a row, 1 in all\)"):
        fit(model, batches([5]), None)
    assert not torch.isfinite(model.layer.weight).all()
    with pytest.raises(NonFiniteError, match=r"as were all 2 last ones \(max_consecutive_errors\); none was taken"):
        fit(Model(adam), batches([1, 2, 3]), NonFiniteGuard("skip", max_consecutive_errors=2))
    monkeypatch.setenv("XLATRAIN_NON_FINITE", "explode")
    with pytest.raises(
        MisconfigurationException, match=r"NonFiniteGuard\(action='explode'\) \(or XLATRAIN_NON_FINITE\): expected"
    ):
        pl.Trainer()


def test_where_it_cannot_look_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    manual = Model(adam)
    manual.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="with manual optimization look in training_step"):
        fit(manual, batches([]), NonFiniteGuard())
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    with pytest.raises(MisconfigurationException, match="they run eagerly"):
        fit(Model(adam), batches([]), NonFiniteGuard())
