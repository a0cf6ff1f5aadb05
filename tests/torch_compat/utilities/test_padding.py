"""Padding to few lengths: what is padded with what, that it changes no number, and that it saves compilations."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from torch_compat import LightningModule, Trainer
from torch_compat.step.recompilation import RecompilationError
from torch_compat.utilities.padding import PadToLengths, length_for, pad_batch

FILL = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def sample(length: int) -> dict[str, Tensor]:
    ids = 1 + torch.arange(length) % 7
    return {"input_ids": ids, "attention_mask": torch.ones(length, dtype=torch.long), "labels": (ids * 3) % 7}


def test_samples_are_padded_to_the_smallest_length_that_fits() -> None:
    batch = PadToLengths((8, 4, 16), FILL)([sample(3), sample(5)])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(FILL, (2, 8))
    assert batch["labels"][0].tolist() == [3, 6, 2, -100, -100, -100, -100, -100]
    assert batch["attention_mask"].sum(1).tolist() == [3, 5]


def test_collated_batches_of_any_kind_are_padded() -> None:
    pair = namedtuple("pair", "x y")
    x, y = torch.ones(2, 3, 5), torch.zeros(2)
    padded = pad_batch(pair(x, y), (4, 6), {0: 9.0}, dim=2)
    assert type(padded) is pair
    assert padded.x.shape == (2, 3, 6)
    assert padded.x[..., 5].unique().tolist() == [9.0]
    assert padded.y is y


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"9 elements, but the longest of lengths=\(4, 8\) is 8"):
        length_for(9, (4, 8))
    with pytest.raises(KeyError, match=r"fill names \['mask'\], but the batch has"):
        pad_batch(sample(3), (4,), {"mask": 0}, dim=0)
    with pytest.raises(ValueError, match="needs lengths"):
        PadToLengths((), FILL)


class Tagger(LightningModule):
    """Masked means and an ignored label: padding does not show."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(8, 6), nn.Linear(6, 7)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        hidden = self.embedding(batch["input_ids"])
        context = (hidden * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        loss = F.cross_entropy(self.head(hidden + context).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def fit(lengths: tuple[int, ...], devices: int = 1) -> tuple[list[float], Any]:
    model = Tagger()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    trainer = Trainer(accelerator="cpu", devices=devices, max_epochs=1, **quiet)
    rows: Any = [sample(length) for length in (3, 4, 6, 5, 2, 7, 8, 8, 3, 5, 4, 4)]
    trainer.fit(model, DataLoader(rows, batch_size=2 // devices, collate_fn=PadToLengths(lengths, FILL)))
    assert trainer.executor.steps is not None
    return [float(loss) for loss in model.losses], trainer.executor.steps.log


def test_padding_changes_no_number_and_saves_compilations() -> None:
    exact, log = fit((4, 5, 6, 7, 8))
    padded, few = fit((8,))
    assert padded == pytest.approx(exact, rel=1e-5)
    assert log.recompilations[0] == (
        'training_step: batch["input_ids"]: int64[2,4] → int64[2,6]; batch["attention_mask"]: int64[2,4] → int64[2,6]; '
        'batch["labels"]: int64[2,4] → int64[2,6]'
    )
    assert (log.variants, few.variants, few.recompilations) == (3, 1, [])  # two sizes, and one program for all others


def test_recompilation_is_forbidden_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_NO_RECOMPILATION_AFTER", "0")
    with pytest.raises(RecompilationError, match=r"\[2,4\] → int64\[2,6\].*\n.*after 1 training batches, but none .* 0"):
        fit((4, 6, 8))
    monkeypatch.setenv("XLATRAIN_NO_RECOMPILATION_AFTER", "soon")
    with pytest.raises(Exception, match="'soon'; expected a number of batches"):
        fit((8,))
