"""Families of known masks: a band, or a band of segments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xlatrain.bridge.capture.masks.band import WHOLE, Band


@dataclass(frozen=True)
class Family:
    """A query sees the keys of the band that are in its own segment.

    Attributes:
        band: by their numbers.
        segments: of queries and of keys, int32 (L,) and (S,); None: all are one.
    """

    band: Band
    segments: tuple[torch.Tensor, torch.Tensor] | None = None


def family_of(seen: torch.Tensor) -> Family | None:
    """The family that a mask is of; None if it is of none, or a query sees no key.

    Args:
        seen: bool (L, S).
    """
    queries, keys = seen.shape
    counts = seen.sum(-1)
    if not bool((counts > 0).all()):
        return None
    marks = seen.to(torch.uint8)
    first, last = marks.argmax(-1), keys - 1 - marks.flip(-1).argmax(-1)
    if not torch.equal(last - first + 1, counts):
        return None
    rows = torch.arange(queries)
    right, left = _distance(last - rows, last == keys - 1), _distance(rows - first, first == 0)
    if left is not False and right is not False:
        return Family(Band(left, right))
    return _of_segments(first, last, rows, keys)


def _distance(by_row: torch.Tensor, at_end: torch.Tensor) -> int | bool | None:
    """How far the rows see that do not see up to the end; None if all do, False if they differ or one at the end sees less."""
    inside = by_row[~at_end]
    if not inside.numel():
        return None if len(by_row) > 1 or bool(at_end.all()) else False
    found = int(inside[0])
    if not bool((inside == found).all()) or bool((by_row[at_end] > found).any()):
        return False
    return found


def _of_segments(first: torch.Tensor, last: torch.Tensor, rows: torch.Tensor, keys: int) -> Family | None:
    """Blocks on the diagonal: whole, or each causal."""
    if len(rows) != keys:
        return None
    begins, numbers = torch.unique(first, return_inverse=True)
    ends = torch.cat([begins[1:], begins.new_tensor([keys])]) - 1
    ids = torch.searchsorted(begins, rows, right=True) - 1
    if int(begins[0]) or not torch.equal(ids, numbers):
        return None
    segments = (ids.to(torch.int32), ids.to(torch.int32))
    if torch.equal(last, rows):
        return Family(Band(None, 0), segments)
    return Family(WHOLE, segments) if torch.equal(last, ends[ids]) else None
