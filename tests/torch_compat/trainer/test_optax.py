"""Transformations of optax in a LightningModule: the numbers of the same optimizer of torch, on meshes, eagerly, resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.callbacks import LearningRateMonitor
from torch_compat.loggers import CSVLogger
from torch_compat.step.optimizers import OptaxOptimizer
from torch_compat.utilities.exceptions import MisconfigurationException

Configure = Callable[["Net"], Any]


class Net(LightningModule):
    """Two layers that are used, one that is not: its parameters have no gradient."""

    def __init__(self, configure: Configure) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.configure = configure

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.second(torch.tanh(self.first(batch[0]))) - batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.configure(self)


class Alternating(Net):
    """An optimizer of each layer, stepped in turn."""

    def __init__(self, configure: Configure) -> None:
        super().__init__(configure)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for optimizer in self.optimizers():
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def fit(module: Net, *, epochs: int = 2, checkpoint: str | None = None, **options: Any) -> Trainer:
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), 16 // options.get("devices", 1))
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", **{"devices": 1, **quiet, **options})
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return trainer


def assert_same(one: Net, other: Net, tolerance: float = 2e-6) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def torch_adamw(module: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 1e-2, weight_decay=0.1)


def optax_adamw(module: Net) -> optax.GradientTransformation:
    return optax.adamw(1e-2, weight_decay=0.1)


def labelled(module: Net) -> optax.GradientTransformation:
    """A schedule, state of its own for one layer, arrays that belong to all parameters."""
    labels = {name: "muon" if name == "first.weight" else "adam" for name, _ in module.named_parameters()}
    rates = optax.linear_schedule(1e-2, 1e-3, 6)
    return optax.multi_transform({"muon": optax.contrib.muon(rates), "adam": optax.adam(rates)}, labels)


def test_same_numbers_as_torchs_on_meshes_and_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Net(torch_adamw)
    fit(reference, gradient_clip_val=0.1, accumulate_grad_batches=2)
    for executor, options in (("compiled", {"devices": 8, "strategy": "fsdp"}), ("eager", {})):
        monkeypatch.setenv("XLATRAIN_EXECUTOR", executor)
        module = Net(optax_adamw)
        untouched = module.unused.weight.detach().clone()
        fit(module, gradient_clip_val=0.1, accumulate_grad_batches=2, **options)  # pyright: ignore[reportArgumentType]
        assert_same(module, reference)
        assert torch.equal(module.unused.weight, untouched)  # no gradient, no decay


def test_resumed_with_another_mesh(tmp_path: Path) -> None:
    whole = Net(labelled)
    fit(whole, epochs=3)
    module = Net(labelled)
    half = fit(module, epochs=1)
    state = half.optimizers[0].state[module.first.weight]
    assert state["inner_states.muon.inner_state.inner_states.muon.inner_state.0.mu"].shape == (8, 8)
    saved = str(tmp_path / "half.ckpt")
    half.save_checkpoint(saved)
    resumed = Net(labelled)
    fit(resumed, epochs=3, checkpoint=saved, devices=8, strategy="fsdp")
    assert_same(resumed, whole, 2e-5)
    with pytest.raises(ValueError, match=r"for parameter 'first.weight' has the entries .* was it saved with another one"):
        fit(Net(optax_adamw), epochs=3, checkpoint=saved)


def test_several_in_manual_optimization() -> None:
    def of_torch(module: Net) -> list[Any]:
        return [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (module.first, module.second)]

    def of_optax(module: Net) -> list[Any]:
        parts = (module.first, module.second)
        return [OptaxOptimizer(optax.sgd(0.1, momentum=0.9), part.named_parameters()) for part in parts]

    ours, reference = Alternating(of_optax), Alternating(of_torch)
    fit(ours)
    fit(reference)
    assert_same(ours, reference)


@pytest.mark.parametrize(
    ("configure", "error", "text"),
    [
        (lambda _: [optax.sgd(0.1), optax.sgd(0.1)], MisconfigurationException, "each of several needs its parameters"),
        (lambda _: optax.flatten(optax.adam(0.1)), ValueError, "for all parameters together"),
        (lambda _: optax.contrib.reduce_on_plateau(), ValueError, "by their gradients alone.*'value'"),
    ],
)
def test_refused(configure: Configure, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fit(Net(configure))


def test_no_option_to_read(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="LearningRateMonitor needs a learning rate"):
        fit(Net(optax_adamw), logger=CSVLogger(tmp_path), callbacks=[LearningRateMonitor()])
