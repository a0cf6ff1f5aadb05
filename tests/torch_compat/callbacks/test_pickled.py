"""Progress bars after a run: they are pickled with their Trainer and its loaders, and can still be read."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from torch_compat import Trainer
from torch_compat.callbacks import RichProgressBar, TQDMProgressBar
from torch_compat.demos.boring_classes import BoringModel


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_bars_after_a_prediction(kind: Any) -> None:
    bar = kind()
    trainer = Trainer(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, callbacks=[bar])
    trainer.predict(BoringModel(), DataLoader(torch.ones(6, 32)))
    if kind is RichProgressBar:
        assert [(task.description, task.completed, task.visible) for task in bar.progress.tasks] == [("Predicting", 3, True)]
    again = pickle.loads(pickle.dumps(bar))
    assert type(again) is kind
    loader = again.trainer.predict_dataloaders
    assert type(loader) is type(trainer.predict_dataloaders)
    assert [batch.shape[0] for batch in loader] == [2, 2, 2]
