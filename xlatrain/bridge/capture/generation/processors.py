"""The library's logits processors, for sequences of which a traced number of tokens is there.

Most take the scores alone. Others ask for the length in Python, or look at all tokens: what they do is computed for every length,
by the processor itself where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_MODULE = "transformers.generation.logits_process"
_OF_SCORES = frozenset(
    {
        *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper"),
        *("EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization", "InfNanRemoveLogitsProcessor"),
        *("SuppressTokensLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor"),
    }
)
"""Those that do the same whatever the tokens are."""

_AT_LENGTHS: dict[str, Callable[[Any, Any], tuple[Any, int]]] = {
    "MinLengthLogitsProcessor": lambda one, length: (length < one.min_length, 0),
    "MinNewTokensLengthLogitsProcessor": lambda one, length: (
        length - one.prompt_length_to_skip < one.min_new_tokens,
        one.prompt_length_to_skip,
    ),
    "ForcedBOSTokenLogitsProcessor": lambda one, length: (length == 1, 1),
    "ForcedEOSTokenLogitsProcessor": lambda one, length: (length == one.max_length - 1, one.max_length - 1),
    "SuppressTokensAtBeginLogitsProcessor": lambda one, length: (length == one.begin_index, one.begin_index),
}
"""Those that act at some lengths: whether they do at this one, and a length at which they do."""


def unknown(processors: Iterable[Any]) -> list[str]:
    """The names of the classes of processors that are none of these."""
    known = {*_OF_SCORES, *_AT_LENGTHS, *_OF_TOKENS}
    return [type(one).__name__ for one in processors if type(one).__module__ != _MODULE or type(one).__name__ not in known]


def processed(processors: Iterable[Any], ids: torch.Tensor, length: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The scores of the next token, float32[B, V].

    Args:
        ids: int64[B, T], of which the first ``length`` (int64 scalar) columns are there.
    """
    for one in processors:
        name = type(one).__name__
        if name in _AT_LENGTHS:
            acts, at = _AT_LENGTHS[name](one, length)
            scores = torch.where(acts, one(ids[:, :1].expand(-1, at), scores), scores)  # only the length counts
        elif name in _OF_TOKENS:
            scores = _OF_TOKENS[name](one, ids, length, scores)
        else:
            scores = one(ids, scores)
    return scores


def _repetition_penalty(one: Any, ids: torch.Tensor, length: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    there = torch.arange(ids.shape[1], device=ids.device) < length
    return one(ids.masked_fill(~there, scores.shape[-1]), scores)  # tokens beyond the vocabulary are left out


def _no_repeat_ngram(one: Any, ids: torch.Tensor, length: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Ban each token that followed the last ``n - 1`` tokens before."""
    size, vocabulary = one.ngram_size, scores.shape[-1]
    if ids.shape[1] < size:
        return scores
    windows = ids.unfold(1, size, 1)
    last = (length - size + 1 + torch.arange(size - 1, device=ids.device)).clamp(min=0)
    alike = (windows[..., :-1] == ids.index_select(1, last)[:, None]).all(-1)
    alike = alike & (torch.arange(windows.shape[1], device=ids.device) + size <= length)
    banned = torch.where(alike, windows[..., -1].clamp(max=vocabulary), vocabulary)
    mask = torch.zeros((scores.shape[0], vocabulary + 1), dtype=torch.bool, device=scores.device).scatter(1, banned, True)
    return scores.masked_fill(mask[:, :vocabulary], -float("inf"))


_OF_TOKENS = {
    "RepetitionPenaltyLogitsProcessor": _repetition_penalty,
    "NoRepeatNGramLogitsProcessor": _no_repeat_ngram,
}
"""Those that look at all tokens."""
