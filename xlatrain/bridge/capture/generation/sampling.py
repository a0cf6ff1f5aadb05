"""Greedy search and sampling: one sequence a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from xlatrain.bridge.capture.generation.processors import processed


@dataclass(frozen=True)
class Sampling:
    """The next token of each row, the likeliest or a draw.

    Attributes:
        max_length: of the sequences.
        draws: whether it is a draw.
    """

    max_length: int
    draws: bool

    def first(self, ids: torch.Tensor, fixed: dict[str, Any]) -> dict[str, torch.Tensor]:
        rows, length = ids.shape
        return {
            "going": torch.ones((), dtype=torch.bool, device=ids.device),
            "ids": torch.cat([ids, ids.new_zeros((rows, self.max_length - length))], dim=1),
            "length": torch.full((), length, dtype=torch.int64, device=ids.device),
            "unfinished": ids.new_ones(rows),
        }

    def choose(
        self, kept: dict[str, torch.Tensor], logits: torch.Tensor, fixed: dict[str, Any]
    ) -> tuple[dict[str, torch.Tensor], None]:
        ids, length, unfinished = kept["ids"], kept["length"], kept["unfinished"]
        scores = processed(fixed["processors"], ids, length, logits)
        if self.draws:
            token = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1)[:, 0]
        else:
            token = torch.argmax(scores, dim=-1)
        if fixed["eos"] is not None:
            token = token * unfinished + fixed["pad"] * (1 - unfinished)
            unfinished = unfinished * (token[:, None] != fixed["eos"]).all(dim=1)
        place = torch.arange(self.max_length, device=ids.device) == length
        ids, length = torch.where(place, token[:, None], ids), length + 1
        going = (unfinished.max() != 0) & (length < self.max_length)
        return {"going": going, "ids": ids, "length": length, "unfinished": unfinished}, None

    def last(self, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        return kept["ids"].index_select(1, kept["length"][None] - 1)[:, 0]

    def sequences(self, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        return kept["ids"]

    def length(self, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        return kept["length"]
