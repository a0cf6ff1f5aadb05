"""What an op on fake tensors returns, found out once and made again for every later op that is alike."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CPU = torch.device("cpu")
_LITERALS = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class NotAlike(Exception):
    """An op that no other is said to be like."""


def describe(value: Any, words: list[Any], operands: list[FakeTensor]) -> None:
    """Add to ``words`` what an argument has in common with others that are alike, and to ``operands`` its tensors.

    Raises:
        NotAlike: it has something that no other has in common with it.
    """
    kind = type(value)
    if kind in _LITERALS:
        words.append((kind, value))
    elif kind is float:
        words.append(repr(value))  # 0.0 and -0.0 are equal
    elif kind is FakeTensor:
        if _is_special(value) or value.constant is not None:
            raise NotAlike
        operands.append(value)
        words.append((value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad))
    elif kind is list or kind is tuple:
        words.append((kind, len(value)))
        for one in value:
            describe(one, words, operands)
    else:
        raise NotAlike


def _is_special(tensor: FakeTensor) -> bool:
    """Whether there is more to it than its shape, strides and dtype: a lazy conjugate or negation, a zero of forward-mode AD."""
    return (
        tensor.is_complex()
        or tensor.layout != torch.strided
        or tensor.fake_device != CPU
        or tensor.is_neg()
        or tensor._is_zerotensor()
    )


@dataclass(frozen=True)
class FakeResult:
    """One tensor that an op returns.

    Attributes:
        alias: the operand of which it is a view, None: memory of its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    alias: int | None

    @classmethod
    def of(cls, value: Any, operands: Sequence[FakeTensor]) -> FakeResult | None:
        """None for a result that is none.

        Raises:
            NotAlike: another op's result cannot be made like it.
        """
        if value is None:
            return None
        if type(value) is not FakeTensor or _is_special(value):
            raise NotAlike
        if value.requires_grad or value.constant is not None or any(value is operand for operand in operands):
            raise NotAlike
        storage = value.untyped_storage()
        same = [i for i, operand in enumerate(operands) if operand.untyped_storage()._cdata == storage._cdata]
        if any(operands[i] is not operands[same[0]] for i in same):  # of which of them is it a view?
            raise NotAlike
        alias = same[0] if same else None
        shape, stride, offset = tuple(value.shape), value.stride(), int(value.storage_offset())
        if alias is None and (offset != 0 or storage.nbytes() != _dense_bytes(shape, stride, value.element_size())):
            raise NotAlike
        return cls(shape, stride, offset, value.dtype, alias)

    def make(self, mode: FakeTensorMode, operands: Sequence[FakeTensor]) -> FakeTensor:
        """Another one like it, of other operands."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            if self.alias is not None:
                storage = operands[self.alias].untyped_storage()
                meta.set_(storage, self.offset, self.shape, self.stride)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return fake(mode, meta)


def fake(mode: FakeTensorMode, meta: torch.Tensor) -> FakeTensor:
    """``FakeTensor(mode, meta, CPU)``, whose many attributes are made once."""
    state = _STATES.get(mode)
    if state is None:
        state = _STATES[mode] = dict(FakeTensor(mode, meta, CPU).__dict__)
    made = torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=CPU)
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(state)
    return made


_STATES: weakref.WeakKeyDictionary[FakeTensorMode, dict[str, Any]] = weakref.WeakKeyDictionary()


def _dense_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    if 0 in shape:
        return 0
    return itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)))
