"""Batches of variable-length sequences padded to few lengths, so that few programs are compiled.

A mask or an ignored label in the padding keeps every number as it is: pad ``attention_mask`` with 0 and ``labels`` with -100 (the
``ignore_index`` of ``torch.nn.functional.cross_entropy``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate


def length_for(longest: int, lengths: Sequence[int]) -> int:
    """The smallest of ``lengths`` that holds ``longest``.

    Raises:
        ValueError: none does.
    """
    fitting = [length for length in lengths if length >= longest]
    if not fitting:
        raise ValueError(
            f"a sequence has {longest} elements, but the longest of lengths={tuple(lengths)} is {max(lengths, default=0)}: add a "
            "greater length, or cut the sequences before they are collated"
        )
    return min(fitting)


def pad_batch(batch: Any, lengths: Sequence[int], fill: Mapping[Any, float], dim: int = 1) -> Any:
    """A collated batch with its sequences padded at their end to one of ``lengths``.

    Args:
        batch: a mapping or sequence of tensors, such as a tokenizer's collator gives. It is not changed.
        lengths: what a batch may be padded to, the same for all batches.
        fill: key (of a mapping) or index (of a sequence) of each tensor to pad → the value to pad it with.
        dim: that is padded, counted from 0 (the batch).

    Returns:
        a batch of the same kind; tensors that ``fill`` does not name are the same objects.

    Raises:
        KeyError: ``fill`` names a tensor that the batch does not have.
        ValueError: a sequence is longer than all lengths.
    """
    _check_names(batch, fill)
    length = length_for(max(batch[name].shape[dim] for name in fill), lengths)
    padded = {name: _pad(batch[name], length, dim, value) for name, value in fill.items()}
    return _with(batch, padded)


class PadToLengths:
    """A ``collate_fn``: pads the samples of a batch to one of few lengths, then collates them.

    ::

        collate = PadToLengths((8, 16), {"tokens": 0, "labels": -100})
        samples = [{"tokens": torch.ones(n), "labels": torch.ones(n)} for n in (5, 7)]
        loader = DataLoader(samples, batch_size=2, collate_fn=collate)
        assert next(iter(loader))["tokens"].shape == (2, 8)

    On several processes each pads its own rows, and all must come to the same length: use one length there, or batch samples
    of like lengths together.

    Args:
        lengths: what a batch may be padded to.
        fill: key or index of each tensor to pad → the value to pad it with.
        collate: collates samples of equal shapes.
        dim: of a sample's tensors that is padded.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        fill: Mapping[Any, float],
        collate: Callable[[list[Any]], Any] = default_collate,
        dim: int = 0,
    ) -> None:
        if not lengths or not fill:
            raise ValueError(f"PadToLengths needs lengths and fill values, got lengths={lengths!r}, fill={fill!r}")
        self.lengths = tuple(sorted(lengths))
        self.fill = dict(fill)
        self.collate = collate
        self.dim = dim

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The collated batch; tensors in ``fill`` have shape ``(len(samples), …, length, …)``."""
        for sample in samples:
            _check_names(sample, self.fill)
        longest = max(torch.as_tensor(sample[name]).shape[self.dim] for sample in samples for name in self.fill)
        length = length_for(longest, self.lengths)
        padded = [
            _with(
                sample, {name: _pad(torch.as_tensor(sample[name]), length, self.dim, value) for name, value in self.fill.items()}
            )
            for sample in samples
        ]
        return self.collate(padded)


def _check_names(batch: Any, fill: Mapping[Any, float]) -> None:
    present = list(batch.keys()) if isinstance(batch, Mapping) else list(range(len(batch)))
    missing = [name for name in fill if name not in present]
    if missing:
        raise KeyError(f"fill names {missing}, but the batch has {present}")


def _pad(tensor: Tensor, length: int, dim: int, value: float) -> Tensor:
    after = length - tensor.shape[dim]
    return tensor if after == 0 else F.pad(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, after], value=value)


def _with(batch: Any, changed: Mapping[Any, Tensor]) -> Any:
    if isinstance(batch, Mapping):
        return {**batch, **changed}
    values = [changed.get(index, value) for index, value in enumerate(batch)]
    return batch._make(values) if hasattr(batch, "_make") else type(batch)(values)
