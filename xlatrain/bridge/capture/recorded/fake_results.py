"""Fake tensors: arguments of a call, and results of ops, computed once and made again for every later op that is alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from xlatrain.bridge.capture.recorded.true_strides import TrueStrides
from xlatrain.bridge.tensors.strides import empty, strides_of

CPU = torch.device("cpu")
_META = torch.device("meta")
_LITERALS = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class NotAlike(Exception):
    """The op counts as like no other."""


def describe(value: Any, words: list[Any], operands: list[FakeTensor], look: Callable[[FakeTensor], Hashable]) -> None:
    """Add to ``words`` a description of an argument that arguments which are alike share, and to ``operands`` its tensors.

    Args:
        look: :func:`look_of`, or what stands for it.

    Raises:
        NotAlike: it has something that no other has in common with it.
    """
    kind = type(value)
    if kind is FakeTensor:
        operands.append(value)
        words.append(look(value))
    elif kind in _LITERALS:
        words.append((kind, value))
    elif kind is float:
        words.append(repr(value))  # 0.0 and -0.0 are equal
    elif kind is list or kind is tuple:
        words.append((kind, len(value)))
        for one in value:
            describe(one, words, operands, look)
    else:
        raise NotAlike


def look_of(tensor: FakeTensor) -> Hashable:
    """The properties of a tensor that an op can find without its values.

    Raises:
        NotAlike: there is more to it than its shape, strides and dtype.
    """
    return (look_without_grad(tensor), tensor.requires_grad)


def look_without_grad(tensor: FakeTensor) -> Hashable:
    """:func:`look_of`, but for what autograd sets later: whether it requires a gradient."""
    if _is_special(tensor) or tensor.constant is not None:
        raise NotAlike
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_special(tensor: FakeTensor) -> bool:
    """Whether shape, strides and dtype do not describe the tensor: a lazy conjugate or negation, a zero of forward-mode AD."""
    return (
        tensor.is_complex()
        or tensor.layout != torch.strided
        or tensor.fake_device != CPU
        or tensor.is_neg()
        or tensor._is_zerotensor()
    )


@dataclass(frozen=True, slots=True)
class FakeResult:
    """A tensor that an op returns.

    Attributes:
        alias: the operand of which it is a view, None: memory of its own.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    alias: int | None

    @classmethod
    def from_value(cls, value: Any, operands: Sequence[FakeTensor]) -> FakeResult | None:
        """The result as a record, to be made again of other operands; None for a None.

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

    def make(self, fakes: Fakes, operands: Sequence[FakeTensor]) -> FakeTensor:
        """Make another result like this, of other operands."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
            if self.alias is not None:
                storage = operands[self.alias].untyped_storage()
                meta.set_(storage, self.offset, self.shape, self.stride)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return fakes.from_meta(meta)


class Fakes:
    """Makes fake CPU tensors of one mode, whose many attributes are made once."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        with torch._C._DisableTorchDispatch():
            self._state = dict(FakeTensor(mode, torch.empty((), device=_META), CPU).__dict__)

    def from_meta(self, meta: torch.Tensor) -> FakeTensor:
        """``FakeTensor(mode, meta, CPU)``."""
        made = torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=CPU)
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._state)
        return made

    def of_look(self, look: tuple[torch.dtype, Sequence[int], Sequence[int], int]) -> FakeTensor:
        """A tensor that has this :func:`look_without_grad`, and memory of its own."""
        dtype, shape, stride, offset = look
        with torch._C._DisableTorchDispatch():
            size = 1 + sum([(n - 1) * step for n, step in zip(shape, stride, strict=True)]) if 0 not in shape else 0
            meta = torch.empty((offset + size,), dtype=dtype, device=_META).as_strided(shape, stride, offset)
        return self.from_meta(meta)

    def like(self, tensor: torch.Tensor) -> FakeTensor:
        """A fake tensor of the tensor's shape, dtype and strides, which requires a gradient if the tensor does."""
        with torch._C._DisableTorchDispatch():
            meta = empty(tensor.shape, tensor.dtype, strides_of(tensor), "meta")
        made = self.from_meta(meta)
        made.requires_grad_(tensor.requires_grad)
        return made


def _dense_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    if 0 in shape:
        return 0
    return itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)))


class FlatCall:
    """The arguments of a call, their tensors apart.

    Attributes:
        mode: of the fake tensors.
        fakes: one fake CPU tensor per tensor leaf; a tensor given twice stays one tensor.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.mode = TrueStrides(allow_non_fake_inputs=True)
        self._leaves, self._spec = pytree.tree_flatten(args)
        made = Fakes(self.mode)
        memo: dict[int, FakeTensor] = {}
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            if id(tensor) not in memo:
                memo[id(tensor)] = made.like(tensor)
        self.fakes = [memo[id(tensor)] for tensor in tensors]

    def args_with(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The arguments with ``tensors`` in place of their own."""
        given = iter(tensors)
        rebuilt = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(rebuilt, self._spec)
