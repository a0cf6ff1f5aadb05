"""Repeated layers run as a loop over parameters stored stacked: nothing that a user sees changes, but rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.step.optimizers.forms import functional_form
from xlatrain.step.stacking import Stacking, StackKey, split_state
from xlatrain.step.state import TrainState

DEPTH, WIDTH = 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Deep(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.seen: list[float] = []
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self(batch[0]).square().mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))
        if batch_idx == 2:  # one layer read, and one written, in the middle of a run
            self.weights.append(self.get_parameter("blocks.1.linear.weight").detach().clone())
            with torch.no_grad():
                self.get_parameter("blocks.2.linear.bias").add_(0.5)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim != 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2)


def fit(folder: Path, roll: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two epochs, saved after the first and resumed: what a user can see of them."""
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", roll)
    monkeypatch.setenv("XLATRAIN_REPORT", str(folder / "report.json"))
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "accelerator": "cpu", "devices": devices}
    options |= {"strategy": "fsdp"} if devices > 1 else {}
    data = DataLoader(TensorDataset(torch.randn(6 * 8, 3, generator=torch.Generator().manual_seed(0))), 8 // devices)
    torch.manual_seed(0)
    first = Deep()
    trainer = Trainer(max_epochs=1, default_root_dir=folder, **options)
    trainer.fit(first, data, data)
    trainer.save_checkpoint(folder / "saved.ckpt")
    second = Deep()
    trainer = Trainer(max_epochs=2, default_root_dir=folder, **options)
    trainer.fit(second, data, data, ckpt_path=str(folder / "saved.ckpt"))
    runs = json.loads((folder / "report.json").read_text())["runs"]
    return {
        "losses": first.seen + second.seen,
        "read": first.weights + second.weights,
        "state": second.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "val": float(trainer.callback_metrics["val"]),
        "loops": runs[-1]["loops"],
    }


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_run_over_stacked_layers_is_the_same_run(devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rolled", "unrolled"):
        (tmp_path / name).mkdir()
    rolled = fit(tmp_path / "rolled", "3", devices, monkeypatch)
    unrolled = fit(tmp_path / "unrolled", "off", devices, monkeypatch)
    assert not unrolled["loops"]
    assert rolled["loops"] and all(text.startswith(f"{DEPTH} × ") and "unrolled" not in text for text in rolled["loops"])
    np.testing.assert_allclose(rolled["losses"], unrolled["losses"], rtol=1e-4)
    assert rolled["val"] == pytest.approx(unrolled["val"], rel=1e-4)
    assert list(rolled["state"]) == list(unrolled["state"])
    for name, value in unrolled["state"].items():
        torch.testing.assert_close(rolled["state"][name], value, rtol=1e-3, atol=1e-4, msg=name)
    for a, b in zip(rolled["read"], unrolled["read"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert rolled["optimizer"].keys() == unrolled["optimizer"].keys()
    for index, state in unrolled["optimizer"].items():
        for name, value in state.items():
            torch.testing.assert_close(rolled["optimizer"][index][name], value, rtol=1e-2, atol=1e-5)


class OwnStep(torch.optim.SGD):
    """An optimizer without an update rule: captured as it is."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_what_cannot_be_stacked_stays_unrolled_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", "3")
    monkeypatch.setenv("XLATRAIN_REPORT", str(tmp_path / "report.json"))
    module = Deep()
    monkeypatch.setattr(module, "configure_optimizers", lambda: OwnStep(module.parameters(), lr=0.1))
    data = DataLoader(TensorDataset(torch.randn(16, 3)), 8)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    Trainer(max_steps=2, accelerator="cpu", devices=1, default_root_dir=tmp_path, **options).fit(module, data)
    loops = json.loads((tmp_path / "report.json").read_text())["runs"][-1]["loops"]
    assert loops and all("left unrolled: the optimizer" in text for text in loops)


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),  # norms of each parameter
    "Muon": lambda params: torch.optim.Muon(params, lr=0.1),  # products of matrices
    "Rprop": lambda params: torch.optim.Rprop(params),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.1, t0=1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_a_stack_is_that_of_its_members(name: str) -> None:
    rng = np.random.default_rng(0)
    paths = [f"layers.{i}.weight" for i in range(3)]
    tensors = {path: torch.tensor(rng.normal(size=(4, 6)).astype(np.float32), requires_grad=True) for path in [*paths, "head"]}
    optimizer = functional_form(OPTIMIZERS[name](tensors.values()), {t: path for path, t in tensors.items()})
    params: dict[str, Any] = {path: jnp.asarray(tensor.detach().numpy()) for path, tensor in tensors.items()}
    opt_state = optimizer.init(params)
    assert optimizer.stackable(paths, opt_state)
    stacking = Stacking((StackKey(tuple(paths)),))
    on_stack = stacking.stack(params), stacking.stack(opt_state)
    by_path = params, opt_state
    for _ in range(3):
        grads = {path: jnp.asarray(rng.normal(size=(4, 6)) * 10**i, jnp.float32) for i, path in enumerate(params)}
        by_path = optimizer.update(grads, by_path[1], by_path[0], optimizer.hyper())
        on_stack = optimizer.update(stacking.stack(grads), on_stack[1], on_stack[0], optimizer.hyper())
    zero = jnp.zeros(())
    split = split_state(TrainState(on_stack[0], {}, on_stack[1], {}, zero, zero))
    assert split.params.keys() == by_path[0].keys()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        (split.params, split.opt_state),
        (by_path[0], by_path[1]),
    )
