"""A step that cannot be recorded runs once more to be captured: what it did to the host the first time is taken back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.wrapped import Wrapped
from torch_compat import LightningModule, Trainer
from torch_compat.step.capture import step_capture
from torch_compat.step.capture.step_capture import Way
from xlatrain.bridge.capture import recorded
from xlatrain.bridge.capture.capture import record
from xlatrain.bridge.capture.recorded.expansions import Expansions
from xlatrain.bridge.capture.recorded.tape import Tape


def of_a_subclass(y: Tensor) -> Tensor:
    return (Wrapped(y.detach()) * 2).mean()


def swapped(y: Tensor) -> Tensor:
    one, other = y.detach() * 2, y.detach() * 3
    torch.utils.swap_tensors(one, other)
    return one.mean()


def without_a_fake_result(y: Tensor) -> Tensor:
    one = y.detach() + 1
    factors: Any = torch.ones(1)  # whose values it wants
    return torch.ops.aten._foreach_addcdiv.Tensor([one], [one], [one], factors)[0].mean()


def of_another_shape(y: Tensor) -> Tensor:
    return F.embedding_bag(torch.tensor([0, 1, 1]), y, torch.tensor([0, 2]), mode="sum").mean()


class Net(LightningModule):
    def __init__(self, odd: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second, self.odd = nn.Linear(4, 4), nn.Linear(4, 4), odd
        self.indices: list[int] = []
        self.count = 0
        self.seen: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        if batch_idx == 0:
            self.toggle_optimizer(second)
        y = self.second(self.first(batch[0]))
        loss = y.square().mean() * random.random() + self.odd(y)
        self.manual_backward(loss)
        first.step()
        second.step()
        self.zero_grad()
        self.indices.append(1)
        self.count += 1
        if batch_idx == 1:
            self.untoggle_optimizer(second)
        self.log("loss", loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        flags = [param.requires_grad for param in self.parameters()]
        self.seen.append((self.count, len(self.indices), flags, float(self.trainer.callback_metrics["loss"])))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.SGD(self.second.parameters(), 0.1)]


def trained(odd: Callable[[Tensor], Tensor], folder: Any) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    module = Net(odd)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=folder, **options)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(20, 4)), 4))
    return [*module.seen, random.random()]


@pytest.mark.parametrize("odd", [of_a_subclass, swapped, without_a_fake_result, of_another_shape])
def test_a_step_that_cannot_be_recorded_has_each_effect_once(
    odd: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    tried: list[Any] = []
    ways = {**step_capture._RUNS, Way.RECORDED: lambda *args: (tried.append(args), record(*args))[1]}
    monkeypatch.setattr(step_capture, "_RUNS", ways)
    found = trained(odd, tmp_path)
    assert len(tried) == 1  # nobody tries again for the step's other forms
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "eager")
    for one, other in zip(found, trained(odd, tmp_path), strict=True):
        assert one == pytest.approx(other, rel=1e-5) if isinstance(one, float) else one[:3] == other[:3]
        if not isinstance(one, float):
            assert one[3] == pytest.approx(other[3], rel=1e-5)


def test_the_switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Without the fast path nothing is recorded, nothing is copied, and a run gives the same."""
    expected = trained(torch.mean, tmp_path)
    used: list[Any] = []
    monkeypatch.setattr(step_capture, "_RUNS", {**step_capture._RUNS, Way.RECORDED: lambda *args: used.append(args)})
    monkeypatch.setattr(Expansions, "copied", lambda self: used.append(self))
    monkeypatch.setattr(Tape, "__enter__", lambda self: used.append(self))
    monkeypatch.setenv(recorded.SWITCH, "0")
    found = trained(torch.mean, tmp_path)
    assert used == []
    assert [one[:3] for one in found[:-1]] == [one[:3] for one in expected[:-1]]
    assert [one[3] for one in found[:-1]] == pytest.approx([one[3] for one in expected[:-1]], rel=1e-6)
    assert found[-1] == expected[-1]
