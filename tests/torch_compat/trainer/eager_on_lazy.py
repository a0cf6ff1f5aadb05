"""Eager steps on a device that is not the CPU, with torch's own lazy tensors (computed by TorchScript) standing in for a GPU.

Run by ``test_eager_device.py`` in a process of its own: torch's autograd knows only devices that were there at its first use.
Prints a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
import warnings
from typing import Any

import torch
import torch._lazy.ts_backend
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy

import torch_compat as pl
from torch_compat.step.eager import eager_run, fallback, host_evaluation

warnings.simplefilter("ignore")
torch._lazy.ts_backend.init()
torch.__future__.set_swap_module_params_on_conversion(True)  # what CUDA does without: parameters stay the same objects
_module_of = torch.get_device_module
_lazy = types.SimpleNamespace(get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state)
torch.get_device_module = lambda device=None: _lazy if str(device).startswith("lazy") else _module_of(device)


class Model(pl.LightningModule):
    def __init__(self, uncompilable_from: int | None = None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.register_buffer("mean", torch.zeros(4))  # BatchNorm does not update its own on lazy tensors
        self.accuracy = BinaryAccuracy()
        self.uncompilable_from = uncompilable_from
        self.seen: set[str] = set()

    def note(self, *tensors: Any) -> None:
        hook = sys._getframe(1).f_code.co_name
        self.seen.update(f"{hook}: {tensor.device.type}" for tensor in tensors)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        with torch.no_grad():
            self.get_buffer("mean").lerp_(x.mean(0), 0.1)
        logits = self.net(x)
        self.accuracy(logits[:, 0], y)
        return torch.nn.functional.cross_entropy(logits, y)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.uncompilable_from is not None and self.current_epoch >= self.uncompilable_from and loss < 0:
            raise AssertionError
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.note(batch[0], self.net[0].weight)

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], batch: list[torch.Tensor], batch_idx: int) -> None:
        self.note(outputs["loss"], batch[0])

    def on_validation_batch_start(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.note(batch[0])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("accuracy", self.accuracy)

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.05)


def loader() -> DataLoader:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)


def run(kind: str, choice: str, directory: str, uncompilable_from: int | None = None) -> dict[str, Any]:
    """Trains, by ``choice``; continues from the checkpoint, all eagerly, and predicts: on the host or on lazy tensors."""
    device = torch.device(kind)
    eager_run.eager_device = fallback.eager_device = host_evaluation.eager_device = lambda mesh: device
    os.environ["XLATRAIN_EXECUTOR"] = choice
    torch.manual_seed(0)
    model = Model(uncompilable_from)
    parameters = list(model.parameters())
    options = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "logger": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=2, default_root_dir=directory, **options)
    trainer.fit(model, loader(), loader())
    path = f"{directory}/{kind}.ckpt"
    trainer.save_checkpoint(path)
    os.environ["XLATRAIN_EXECUTOR"] = "eager"
    trainer = pl.Trainer(max_epochs=3, default_root_dir=directory, **options)
    trainer.fit(model, loader(), loader(), ckpt_path=path)
    logged = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    predictions = trainer.predict(model, loader())
    return {
        "logged": logged,
        "weights": torch.cat([p.detach().flatten() for p in [*parameters, *model.buffers()]]).tolist(),
        "predictions": torch.cat(predictions).flatten().tolist(),
        "seen": sorted(model.seen),
        "at the end": sorted(
            {t.device.type for t in [*model.parameters(), *model.buffers(), *predictions]} | {model.device.type}
        ),
        "same parameters": all(one is other for one, other in zip(parameters, model.parameters(), strict=True)),
        "executor": type(trainer.executor.steps).__name__,
    }


with tempfile.TemporaryDirectory() as directory:
    print(
        json.dumps(
            {
                "host": run("cpu", "eager", directory),
                "lazy": run("lazy", "auto", directory, uncompilable_from=1),
            }
        )
    )
