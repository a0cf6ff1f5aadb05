"""``bars_script.py PACKAGE``: what is done to the bars of runs, in order, as JSON in the last line."""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

package = sys.argv[1]
pl: Any = importlib.import_module(package)
bars: Any = importlib.import_module(f"{package}.callbacks.progress.tqdm_progress")
events: list[Any] = []
nowhere = io.StringIO()


class Bar(bars.Tqdm):
    label = ""

    def reset(self, total: float | None = None) -> None:
        events.append((self.label, "reset", total))
        super().reset(total)

    def refresh(self, *args: Any, **kwargs: Any) -> None:
        events.append((self.label, "refresh", self.n, self.total))
        super().refresh(*args, **kwargs)

    def close(self) -> None:
        events.append((self.label, "close", self.n, self.total))
        super().close()

    def set_postfix(self, ordered_dict: Any = None, refresh: bool = True, **kwargs: Any) -> None:
        events.append((self.label, "postfix", sorted(ordered_dict or {}), refresh))
        super().set_postfix(ordered_dict, refresh, **kwargs)

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        events.append((self.label, "description", desc, refresh))
        super().set_description(desc, refresh)


class Progress(pl.callbacks.TQDMProgressBar):
    def made(self, label: str, leave: bool) -> Bar:
        bar = Bar(disable=self.is_disabled, leave=leave, file=nowhere, mininterval=0, miniters=1)
        bar.label = label
        events.append((label, "made"))
        return bar

    def init_sanity_tqdm(self) -> Bar:
        return self.made("sanity", leave=False)

    def init_train_tqdm(self) -> Bar:
        return self.made("train", leave=True)

    def init_validation_tqdm(self) -> Bar:
        return self.made("val", leave=False)

    def init_test_tqdm(self) -> Bar:
        return self.made("test", leave=True)

    def init_predict_tqdm(self) -> Bar:
        return self.made("predict", leave=True)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.layer(batch[0]).pow(2).mean(), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.layer(batch[0]).pow(2).mean(), prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(4),)] * 10)


def loader(rows: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(rows, 4)), 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "limited": {"limit_train_batches": 4, "limit_val_batches": 2},
    "validation inside": {"val_check_interval": 2},
    "every other epoch": {"max_epochs": 1, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
}
RATES: dict[str, dict[str, Any]] = {
    "each batch": {"refresh_rate": 1},
    "every second": {"refresh_rate": 2},
    "every third, left": {"refresh_rate": 3, "leave": True},
}
QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
kept, found = [], {}
for rate, bar in RATES.items():
    for option, more in OPTIONS.items():
        events.clear()
        trainer = pl.Trainer(**{"max_epochs": 2, **QUIET, **more}, enable_model_summary=False, callbacks=[Progress(**bar)])
        kept.append(trainer)  # whose bars would be closed once more
        module = Net()
        trainer.fit(module, loader(14), [loader(6), loader(5)])
        trainer.validate(module, loader(5), verbose=False)
        trainer.test(module, loader(6), verbose=False)
        trainer.predict(module, loader(7))
        found[f"{rate}, {option}"] = list(events)
events.clear()
trainer = pl.Trainer(max_epochs=1, **QUIET, enable_model_summary=False, callbacks=[Progress()])
trainer.fit(Net(), DataLoader(Endless(), 3))
found["no length"] = list(events)
print()
print(json.dumps(found))
