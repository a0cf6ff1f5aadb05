"""A backward pass that changes or reads something on the host, beside hooks that come before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.step.capture.taken_hooks import TakenHooks
from torch_compat.step.capture.watched_backward import WatchedBackward
from torch_compat.utilities.exceptions import MisconfigurationException


class Ordered(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).sum()

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.seen.append("hook")

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.seen.append("backward")
        loss.backward()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_its_effects_come_after_the_hooks_before_it(tmp_path: Any) -> None:
    module = Ordered()
    trainer = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, devices=1, default_root_dir=tmp_path
    )
    with pytest.warns(
        UserWarning, match=r"backward, which Ordered or a plugin overrides, reads Ordered\.seen .* and on_before_backward"
    ):
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(3, 2)), batch_size=1))
    assert module.seen == ["hook", "backward"] * 3


FACTORS = {"hooks": 1.0}


class Followed(Ordered):
    """Each batch has a larger gradient than the one before: the hook before backward says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.zeros_(self.layer.weight)
        self.factor = 0.0

    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.factor += 1
        FACTORS["hooks"] = self.factor

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)


class InBackward(Followed):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * self.factor).backward()


class InAHook(Followed):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.layer(batch[0])
        out.register_hook(lambda gradient: gradient * FACTORS["hooks"])
        return out.sum()


class InAFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.module, ctx.one = module, 1.0
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.module.factor * ctx.one, None


class WithAFunction(Followed):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return InAFunction.apply(self.layer(batch[0]), self).sum()  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("kind", "text"), [(InBackward, r"reads InBackward\.factor"), (InAHook, "reads FACTORS"), (WithAFunction, r"\.factor")]
)
def test_it_reads_what_the_hooks_before_it_left(kind: type[Followed], text: str, tmp_path: Any) -> None:
    module = kind()
    trainer = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, devices=1, default_root_dir=tmp_path
    )
    with pytest.warns(UserWarning, match=text):
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(3, 2)), batch_size=1))
    assert module.layer.weight.detach().flatten().tolist() == pytest.approx([-0.6, -0.6])  # 0.1 * (1 + 2 + 3)


def test_what_it_reads_of_its_own_is_no_reason(tmp_path: Any, recwarn: pytest.WarningsRecorder) -> None:
    trainer = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, devices=1, default_root_dir=tmp_path
    )
    trainer.fit(Followed(), DataLoader(TensorDataset(torch.ones(3, 2)), batch_size=1))
    assert not [one for one in recwarn if "run eagerly" in str(one.message)]


class Clamped(Ordered):
    """Its hook between forward and backward clamps a weight, as one that follows the update did in Lightning 1."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most = most

    backward = LightningModule.backward

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.layer.weight.data = self.layer.weight.data.clamp(-self.most, self.most)


def test_a_parameter_is_not_changed_between_forward_and_backward(tmp_path: Any) -> None:
    def fit(module: LightningModule) -> None:
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "devices": 1}
        trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, **options)
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(3, 2)), batch_size=1))

    fit(Clamped(10.0))  # which changes nothing
    with pytest.raises(MisconfigurationException, match=r"changed the parameter 'layer\.weight', but .* on_train_batch_end"):
        fit(Clamped(0.1))


def test_a_leaf_that_is_no_parameter_needs_a_whole_backward_pass() -> None:
    weight, batch = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    assert not WatchedBackward(TakenHooks({}, {})).needed_for((batch.detach() * weight).sum(), [weight])
    assert WatchedBackward(TakenHooks({}, {})).needed_for((2 * batch * weight).sum(), [weight])
