"""Packed sequences (``nn.utils.rnn``) as padded ones with a mask of their steps.

torch packs time step by time step, sequences from the longest to the shortest: the packed rows are the padded steps (T, B) that a
mask selects, so they are :class:`MaskedRows`, and lengths may be others in every batch. Only the longest length is a size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from xlatrain.bridge.capture.cut import UnknownValueError, ask
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows
from xlatrain.bridge.patches import patched


def packed_rows(padded: torch.Tensor, valid: torch.Tensor) -> MaskedRows:
    """The packed rows of ``padded`` (T, B, …), which is finite everywhere, and ``valid`` (T, B)."""
    return MaskedRows.of(padded.flatten(0, 1), _flat(valid))


def _flat(valid: torch.Tensor) -> torch.Tensor:
    """``valid`` (T × B,): the same object for the same ``valid``."""
    flat = getattr(valid, "_xlatrain_flat", None)
    if flat is None:
        flat = valid.flatten()
        valid._xlatrain_flat, flat._xlatrain_steps = flat, valid  # pyright: ignore[reportAttributeAccessIssue]
    return flat


def padded_rows(data: torch.Tensor, batch_sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Packed ``data`` as padded steps (T, B, …), and which are valid (T, B); None where a needed value is not known."""
    if type(data) is MaskedRows and data.axis == 0 and (valid := getattr(data.valid, "_xlatrain_steps", None)) is not None:
        return data.rows.unflatten(0, valid.shape), valid
    try:
        size = int(batch_sizes[0]) if type(batch_sizes) is torch.Tensor else ask(batch_sizes, _first, "the first batch size")
    except UnknownValueError:
        return None
    if type(data) is MaskedRows:
        data = data.exact()
    valid = torch.arange(size)[None, :] < batch_sizes[:, None]
    padded = data.new_zeros(batch_sizes.shape[0], size, *data.shape[1:])
    return padded.index_put((valid,), data), valid


def _first(batch_sizes: torch.Tensor) -> int:
    return int(batch_sizes[0])


def _lengths(lengths: torch.Tensor) -> tuple[int, bool, bool]:
    """The longest, whether all are above 0, and whether they go down."""
    return int(lengths.max()), bool((lengths > 0).all()), bool((lengths[1:] <= lengths[:-1]).all())


@contextlib.contextmanager
def packed_sequences() -> Iterator[None]:
    """Within the block sequences are packed and padded without a size for each set of lengths."""
    pack_padded, pad_packed = torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence  # pyright: ignore

    def pack(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        try:
            if type(lengths) is torch.Tensor:
                longest, positive, sorted_ = _lengths(lengths)
            else:
                longest, positive, sorted_ = ask(lengths, _lengths, "the longest, and whether they go down,")
        except UnknownValueError:
            return pack_padded(x, lengths, batch_first)
        x = x.transpose(0, 1) if batch_first else x
        if lengths.ndim != 1 or lengths.shape[0] != x.shape[1]:
            raise RuntimeError(
                f"Expected `len(lengths)` to be equal to batch_size, but got {lengths.shape[0]} (batch_size={x.shape[1]})"
            )
        if not positive:
            raise RuntimeError("Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0")
        if not sorted_:
            raise RuntimeError(
                "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass "
                "`enforce_sorted=False` to pack_padded_sequence and/or pack_sequence"
            )
        valid = torch.arange(longest)[:, None] < lengths[None, :]
        steps = x.narrow(0, 0, longest)
        mask = valid.reshape(longest, x.shape[1], *[1] * (x.ndim - 2))
        with torch.no_grad():
            start = steps.detach()[:1]  # every sequence has a first step
        return packed_rows(torch.where(mask, steps, start), valid), valid.sum(1)

    def pad(data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: float, total: int) -> Any:
        found = padded_rows(data, batch_sizes)
        if found is None:
            return pad_packed(data, batch_sizes, batch_first, value, total)
        padded, valid = found
        padded = torch.where(valid.reshape(*valid.shape, *[1] * (padded.ndim - 2)), padded, value)
        if total > valid.shape[0]:
            padded = torch.cat([padded, padded.new_full((total - valid.shape[0], *padded.shape[1:]), value)])
        return padded.transpose(0, 1) if batch_first else padded, valid.sum(0)

    with patched([(torch._VF, "_pack_padded_sequence", pack), (torch._VF, "_pad_packed_sequence", pad)]):
        yield
