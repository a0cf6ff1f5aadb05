"""Every op that a function dispatches, as one digest: runs with equal digests are captured as equal graphs.

The log is taken above functionalization and decomposition, which are functions of it. It has each op's name, its literal
arguments and which earlier tensor each tensor argument is; inputs and tensors from outside count as they are first seen, small
ones of the latter with their values. Writes to tensors from outside, which a graph cannot make, are refused.
So :func:`~xlatrain.bridge.capture.rehearse`, which makes no graph, tells whether a function still does what was captured. The
converse does not hold: where the digests differ, the graphs may still be equal.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from xlatrain.bridge.constants import SMALL, contents_of
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.op_mode import OpMode


def leaves_of(value: Any) -> list[Any]:
    """``pytree.tree_leaves(value)``, faster where only tuples, lists and dicts are nested, as in arguments of ops."""
    kind = type(value)
    if kind is dict:
        value = value.values()
    elif kind is not tuple and kind is not list:
        return pytree.tree_leaves(value)
    found: list[Any] = []
    for one in value:
        kind = type(one)
        if isinstance(one, torch.Tensor) or kind in _LEAVES:
            found.append(one)
        else:
            found.extend(leaves_of(one))
    return found


_LEAVES = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class OpLog(OpMode):
    """``with OpLog(inputs) as log: result = fn(*inputs)``, then ``log.digest(result)``.

    Args:
        inputs: the tensors that the function is given.

    Raises:
        CaptureError: from the op that writes in place to a tensor which the function was not given.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._hash = hashlib.blake2b(digest_size=16)
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # an id must not be used twice
        self._outside: set[int] = set()  # storages
        for tensor in inputs:
            self._note("input", self._new(tensor))

    def op(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._note(str(func), *map(self._name, leaves_of(args)), *map(self._name, leaves_of(kwargs)), *kwargs)
        if self._outside and func._schema.is_mutable:
            self._check_written(func, args, kwargs)
        result = func(*args, **kwargs)
        for leaf in leaves_of(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._numbers:
                self._note("output", self._new(leaf))
        return result

    def _check_written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for tensor in written_by(func, args, kwargs):
            if type(tensor) in _REAL and tensor.untyped_storage()._cdata in self._outside:
                raise CaptureError(
                    f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: it writes in place to a tensor "
                    f"({tensor.dtype}{list(tensor.shape)}) that is neither a buffer nor a parameter, which a compiled step would "
                    "do only once.\n  Fix: make it a buffer (self.register_buffer(name, tensor)), or assign a new tensor instead "
                    "(self.total = self.total + x)."
                )

    def digest(self, result: Any) -> str:
        """The digest of the run, in which the function returned ``result`` (a pytree)."""
        leaves, structure = pytree.tree_flatten(result)
        self._note("result", *map(self._name, leaves), str(structure))
        return self._hash.hexdigest()

    def _note(self, *words: str) -> None:
        self._hash.update("\x1f".join(words).encode())
        self._hash.update(b"\n")

    def _name(self, leaf: Any) -> str:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        number = self._numbers.get(id(leaf))
        return f"%{number}" if number is not None else f"{self._new(leaf)}{self._values(leaf)}"

    def _values(self, tensor: torch.Tensor) -> str:
        """What there is to know of the values of a tensor from outside."""
        if type(tensor) not in _REAL:
            return ""
        self._outside.add(tensor.untyped_storage()._cdata)
        return contents_of(tensor) if tensor.nbytes <= SMALL else f"{tensor.data_ptr()} {tensor._version}"

    def _new(self, tensor: torch.Tensor) -> str:
        number = self._numbers[id(tensor)] = len(self._kept)
        self._kept.append(tensor)
        return f"%{number}:{tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad}"


_REAL = (torch.Tensor, torch.nn.Parameter)


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an op that it writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in leaves_of((value,)) if isinstance(leaf, torch.Tensor))
