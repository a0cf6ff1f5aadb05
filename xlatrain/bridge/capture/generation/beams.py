"""Beam search: for each row several sequences that go on, and the best that have ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from xlatrain.bridge.capture.generation.processors import processed


@dataclass(frozen=True)
class Beams:
    """The best continuations of each row's beams, by the library's own rules.

    Shapes: B rows, K beams, C candidates in each turn, T tokens at most.

    Attributes:
        model: of the library, whose rules they are.
        config: the generation's.
        prompt: the number of tokens of the prompt.
        max_length: T.
    """

    model: Any
    config: Any
    prompt: int
    max_length: int

    def first(self, ids: torch.Tensor, fixed: dict[str, Any]) -> dict[str, torch.Tensor]:
        beams, rows = self.config.num_beams, ids.shape[0] // self.config.num_beams
        fill = ids.new_full((), -1)
        if fixed["eos"] is not None:
            fill = torch.where(fixed["pad"] != 0, fixed["pad"], fixed["eos"][0])  # `pad or eos`, as the library has it
        rest = fill.expand(ids.shape[0], self.max_length - self.prompt)
        sequences = torch.cat([ids, rest], dim=1).reshape(rows, beams, -1)
        scores = torch.full((rows, beams), -1e9, device=ids.device)
        return {
            "going": torch.ones((), dtype=torch.bool, device=ids.device),
            "running": sequences,
            "running_scores": torch.where(torch.arange(beams, device=ids.device) == 0, 0.0, scores),  # all beams are the same yet
            "sequences": sequences.clone(),
            "scores": scores,
            "generated": ids.new_zeros((rows, beams, 1)),
            "finished": torch.zeros((rows, beams), dtype=torch.bool, device=ids.device),
            "improvable": torch.ones((rows, 1), dtype=torch.bool, device=ids.device),
            "length": torch.full((), self.prompt, dtype=torch.int64, device=ids.device),
        }

    def choose(
        self, kept: dict[str, torch.Tensor], logits: torch.Tensor, fixed: dict[str, Any]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        length, device = kept["length"], logits.device
        rows, beams, _ = kept["running"].shape
        eos, penalty, early = fixed["eos"], self.config.length_penalty, self.config.early_stopping
        found, source, token = self._candidates(kept, logits, fixed)
        candidates = self.model._gather_beams(kept["running"], source)
        candidates = torch.where(torch.arange(self.max_length, device=device) == length, token[..., None], candidates)
        hits = (length + 1 >= self.max_length).expand(token.shape)
        if eos is not None:
            hits = hits | (token[..., None] == eos).any(dim=-1)
        from_rows = (source + beams * torch.arange(rows, device=device)[:, None])[..., None]
        running, running_scores, from_rows = self.model._get_running_beams_for_next_iteration(
            topk_log_probs=found,
            topk_running_sequences=candidates,
            topk_running_beam_indices=from_rows,
            next_token_hits_stopping_criteria=hits,
            num_beams=beams,
        )
        sequences, scores, generated, finished = self.model._update_finished_beams(
            sequences=kept["sequences"],
            topk_running_sequences=candidates,
            beam_scores=kept["scores"],
            topk_log_probs=found,
            beam_indices=kept["generated"],
            topk_running_beam_indices=(length + 1 - self.prompt).expand(rows, token.shape[1], 1),
            is_early_stop_heuristic_unsatisfied=kept["improvable"],
            is_sent_finished=kept["finished"],
            next_token_hits_stopping_criteria=hits,
            top_num_beam_mask=torch.arange(token.shape[1], device=device) < beams,
            num_beams=beams,
            cur_len=length,
            decoder_prompt_len=self.prompt,
            length_penalty=penalty,
            early_stopping=early,
        )
        length = length + 1
        improvable = self.model._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=kept["improvable"],
            running_beam_scores=running_scores,
            beam_scores=scores,
            is_sent_finished=finished,
            cur_len=length,
            max_length=self.max_length,
            decoder_prompt_len=self.prompt,
            early_stopping=early,
            length_penalty=penalty,
        )
        now = {
            "going": self.model._beam_search_has_unfinished_sequences(improvable, finished, hits, early),
            "running": running,
            "running_scores": running_scores,
            "sequences": sequences,
            "scores": scores,
            "generated": generated,
            "finished": finished,
            "improvable": improvable,
            "length": length,
        }
        return now, from_rows.reshape(-1)

    def _candidates(
        self, kept: dict[str, torch.Tensor], logits: torch.Tensor, fixed: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Accumulated log probabilities, beams and tokens of the continuations to look at: (B, C) each.

        So many that K of them go on, though others end.
        """
        rows, beams, _ = kept["running"].shape
        ids = kept["running"].reshape(rows * beams, -1)
        scores = processed(fixed["processors"], ids, kept["length"], torch.log_softmax(logits, dim=-1))
        vocabulary = scores.shape[-1]
        scores = (scores.reshape(rows, beams, -1) + kept["running_scores"][..., None]).reshape(rows, -1)
        count = max(2, 1 + (0 if fixed["eos"] is None else len(fixed["eos"]))) * beams
        if self.config.do_sample:
            indices = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=count)
            found = torch.gather(scores, 1, indices)
        else:
            found, indices = torch.topk(scores, count)
        return found, indices // vocabulary, indices % vocabulary

    def last(self, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        running = kept["running"].reshape(-1, self.max_length)
        return running.index_select(1, kept["length"][None] - 1)[:, 0]

    def sequences(self, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        return kept["sequences"][:, : self.config.num_return_sequences].reshape(-1, self.max_length)

    def length(self, kept: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.prompt + kept["generated"][:, : self.config.num_return_sequences].max()
