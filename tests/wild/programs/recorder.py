"""Writes down what a library's run did: losses, metrics, weights. Imported first by each program, under stock and here alike."""

from __future__ import annotations

import atexit
import json
import os
import sys
import types
from typing import Any

import numpy as np
import torch

RECORD: dict[str, Any] = {"losses": [], "metrics": {}, "weights": {}, "runs": 0}


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, int | float | np.number) else None


def _recorder(base: type) -> Any:
    class Recorder(base):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if (number := _number(loss)) is not None:
                RECORD["losses"].append(number)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            RECORD["runs"] += 1
            for name, value in trainer.callback_metrics.items():
                RECORD["metrics"][f"{RECORD['runs']} {name}"] = _number(value)
            for name, value in module.state_dict().items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    RECORD["weights"][f"{RECORD['runs']} {name}"] = float(value.double().abs().mean())

    return Recorder()


def _follow(package: types.ModuleType) -> None:
    """Every Trainer of the package gets the recorder as it begins to fit."""
    fit = package.Trainer.fit

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(type(one).__name__ == "Recorder" for one in self.callbacks):
            self.callbacks.append(_recorder(package.Callback))
        return fit(self, *args, **kwargs)

    package.Trainer.fit = recorded


def _write() -> None:
    with open(os.environ["WILD_RECORD"], "w") as file:
        json.dump(RECORD, file)


def start() -> None:
    """Follow both names of Lightning, seed, and write at the end."""
    import lightning.pytorch as new
    import pytorch_lightning as old

    _follow(new)
    if old.Trainer is not new.Trainer:
        _follow(old)
    seed()
    atexit.register(_write)


DEVICES = int(os.environ.get("WILD_DEVICES", "1"))
PRECISION: Any = os.environ.get("WILD_PRECISION", "32-true")


def trainer(**options: Any) -> Any:
    """A Trainer that writes nothing, on as many devices as this run of the program is for."""
    import lightning.pytorch as pl

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=DEVICES, **{"precision": PRECISION, **quiet, **options})


def fit(net: Any, loss: Any, data: list[Any], *, batch_size: int, data_parallel: bool = True) -> None:
    """Train a network of a library's for two epochs: ``loss(net, *tensors of the batch)``, Adam.

    On eight devices each has an eighth of the batch: the same global batches.
    """
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            value = loss(self.net, *batch)
            self.log("loss", value)
            return value

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", loss(self.net, *batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([one for one in self.parameters() if one.requires_grad], 1e-3)

    if DEVICES > 1 and not data_parallel:
        sys.exit("not data-parallel")
    loader = DataLoader(TensorDataset(*data), batch_size=batch_size // DEVICES)
    trainer(max_epochs=2).fit(Module(), loader, loader)


def seed(value: int = 1) -> None:
    import random

    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


if "WILD_RECORD" in os.environ and "recorder" in sys.modules:
    start()
