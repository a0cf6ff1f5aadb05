"""Every op that a function dispatches, as one digest: runs with equal digests are captured as equal graphs.

The log is taken above functionalization and decomposition, which are functions of it. It has each op's name, its literal
arguments and which earlier tensor each tensor argument is; inputs and tensors from outside count as they are first seen, small
ones of the latter with their values. Writes to tensors from outside, which a graph cannot make, are refused.
So :func:`~xlatrain.bridge.capture.capture.record`, which makes no graph, tells whether a function still does what was captured.
The converse does not hold: where the digests differ, the graphs may still be equal.
"""

from __future__ import annotations

import contextvars
import hashlib
import traceback
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from xlatrain.bridge.capture.foreign_memory import REAL, is_foreign
from xlatrain.bridge.capture.op_facts import OpFacts, OpMode
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.random import drawn_by_torch, moves
from xlatrain.bridge.tensors.constants import SMALL, contents_of


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
        if kind in _LEAVES or isinstance(one, torch.Tensor):
            found.append(one)
        else:
            found.extend(leaves_of(one))
    return found


_LEAVES = frozenset((FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


class OpRecorder(Protocol):
    """A mode that tells logs of the ops that it sees: another mode above it would double what an op costs."""

    logs: list[OpLog]


RECORDER: contextvars.ContextVar[OpRecorder | None] = contextvars.ContextVar("xlatrain_op_recorder", default=None)


class Seen(NamedTuple):
    """Contents that ops have seen in a tensor from outside, whose memory an array has, too; where the first one was called."""

    tensor: torch.Tensor
    contents: set[str]
    where: str


class OpLog(OpMode):
    """A log of the ops of a run: ``with OpLog(inputs) as log: result = fn(*inputs)``, then ``log.digest(result)``.

    Args:
        inputs: the tensors that the function is given.

    Attributes:
        outside: the tensors that ops were given and the function was not, but those that ops have made.
        seen: the contents that ops have seen in those of them whose memory others have, with the user's line.
        by_identity: whether the digest has an object that is told by its id: functions of ops of higher order, generators.

    Raises:
        CaptureError: from the op that writes in place to a tensor which the function was not given.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._hash = hashlib.blake2b(digest_size=16)
        self._words: list[str] = []  # not yet hashed
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # an id must not be used twice
        self.outside: list[torch.Tensor] = []
        self.seen: dict[int, Seen] = {}
        self.by_identity = False
        self._seeded = False
        self._outside: set[int] = set()  # storages
        self._recorder: OpRecorder | None = None
        for tensor in inputs:
            self._words.append(f"input {self._new(tensor)}")

    def __enter__(self) -> OpLog:
        recorder = RECORDER.get()
        if recorder is None or _get_current_dispatch_mode() is not recorder:
            return super().__enter__()
        self._recorder = recorder
        recorder.logs.append(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._recorder is None:
            super().__exit__(kind, error, trace)
        else:
            self._recorder.logs.remove(self)
        if self.outside and any(_UNSEEN in str(one) for one in (error, getattr(error, "__cause__", None))):
            refusal = self._refusal(self.outside[-1], traceback.extract_tb(trace))
            refusal.written = tuple(map(weakref.ref, reversed(self.outside)))  # nobody tells which
            raise refusal from error

    def op(self, facts: OpFacts, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.note_call(*outline(facts, args, kwargs))
        self.check_written(facts, args, kwargs)
        result = facts.func(*args, **kwargs)
        self.note_results(result)
        return result

    def note_call(self, text: str, operands: Sequence[torch.Tensor]) -> None:
        """An op is called, with an :func:`outline`."""
        numbers = self._numbers
        self.by_identity |= _OBJECT in text
        words = [text]
        for tensor in operands:
            if type(tensor) in REAL and is_foreign(tensor) and tensor.nbytes <= SMALL:
                self._see(tensor)
            number = numbers.get(id(tensor))
            words.append(str(number) if number is not None else f"{self._new(tensor)}{self._values(tensor)}")
        self._words.append("\x1f".join(words))
        if len(self._words) > _UNHASHED:
            self._hash_words()

    def _see(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self.seen:
            self.seen[id(tensor)] = Seen(tensor, set(), user_line(traceback.extract_stack()) or "the step")
        self.seen[id(tensor)].contents.add(contents_of(tensor))

    def note_results(self, result: Any) -> None:
        """Note the result of the last op."""
        for leaf in leaves_of((result,)):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self._numbers:
                self._words.append(self._new(leaf))

    def note_made(self, result: Any, texts: Sequence[str | None]) -> None:
        """The same, where it is known that results are new, and how they look (:func:`look_text`); None for one that is none."""
        results = result if type(result) in (tuple, list) else (result,)
        for leaf, text in zip(results, texts, strict=True):
            if text is not None:
                self._words.append(text)
                self._number(leaf)

    def check_written(self, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuse what a graph cannot do, and note whether anything is drawn."""
        self._seeded |= facts.seeded
        if not self._outside or not facts.mutable:
            return
        for tensor in written_by(facts.func, args, kwargs):
            if type(tensor) in REAL and tensor.untyped_storage()._cdata in self._outside:
                raise self._refusal(tensor, traceback.extract_stack())

    def _refusal(self, tensor: torch.Tensor, frames: traceback.StackSummary) -> CaptureError:
        """The error of a write to ``tensor``, which the function was not given; ``frames`` led to it."""
        error = CaptureError(
            f"{user_line(frames) or 'the step'}\n  cannot be captured: it writes in place to a tensor "
            f"({tensor.dtype}{list(tensor.shape)}) that is neither a buffer nor a parameter, which a compiled step would do only "
            "once.\n  Fix: make it a buffer (self.register_buffer(name, tensor)), or assign a new tensor instead "
            "(self.total = self.total + x)."
        )
        storage = tensor.untyped_storage()._cdata
        of_it = {id(one): one for one in self.outside if one.untyped_storage()._cdata == storage}
        error.written = tuple(map(weakref.ref, of_it.values())) if len(of_it) == 1 else ()
        return error

    def digest(self, result: Any) -> str:
        """The digest of the run, in which the function returned ``result`` (a pytree)."""
        leaves, structure = pytree.tree_flatten(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [_OPERAND if isinstance(leaf, torch.Tensor) else argument_text(leaf, "the result") for leaf in leaves]
        self.note_call("\n".join([f"result {structure}", *others]), tensors)
        if self._seeded:  # of a run that draws nothing the graph is the same
            self._words.append(f"drawn {'by torch' if drawn_by_torch() else 'in the program'}, {moves()}")
        self._hash_words()
        return self._hash.hexdigest()

    def _hash_words(self) -> None:
        self._hash.update("\n".join([*self._words, ""]).encode())
        self._words.clear()

    def _values(self, tensor: torch.Tensor) -> str:
        """A description of the values of a tensor that was made outside of the run."""
        if type(tensor) not in REAL:
            return ""
        self.outside.append(tensor)
        self._outside.add(tensor.untyped_storage()._cdata)
        return contents_of(tensor) if tensor.nbytes <= SMALL else f"{tensor.data_ptr()} {tensor._version}"

    def _new(self, tensor: torch.Tensor) -> str:
        self._number(tensor)
        return look_text(tensor)

    def _number(self, tensor: torch.Tensor) -> None:
        self._numbers[id(tensor)] = len(self._kept)
        self._kept.append(tensor)


_UNHASHED = 1 << 14
_UNSEEN = "mutating a non-functional tensor"
"""Said of a write that no schema tells (of ``batch_norm``), or through a view that was made before there was a value to write."""
_OPERAND = "%"
_OBJECT = "\x1fthe "  # no literal has it: a text is quoted, with its control characters escaped


def look_text(tensor: torch.Tensor) -> str:
    """The log's description of a new tensor, which gets the next number."""
    return f"{_OPERAND}{tensor.dtype}{tuple(tensor.shape)}{tensor.requires_grad}"


def outline(facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, list[torch.Tensor]]:
    """A call but for which tensors it is given, as text; and these tensors, in the order of the arguments."""
    operands: list[torch.Tensor] = []
    words = [facts.name]
    for leaf in (*leaves_of(args), *leaves_of(kwargs)):
        if isinstance(leaf, torch.Tensor):
            operands.append(leaf)
            words.append(_OPERAND)
        else:
            words.append(argument_text(leaf, facts.name))
    return "\x1f".join([*words, *kwargs]), operands


def argument_text(value: Any, taker: str) -> str:
    """Text of an argument that is no tensor. None is asked to print itself: a storage of a fake tensor has no memory to print.

    Args:
        taker: the op that it is given to.

    Raises:
        CaptureError: a graph cannot have it.
    """
    kind = type(value)
    if kind in _LITERALS:
        return repr(value)
    if callable(value) or isinstance(value, torch.Generator):  # of an op of higher order; that no op draws from is seen elsewhere
        return f"{_OBJECT}{kind.__qualname__} {id(value)}"
    shares = isinstance(value, torch.UntypedStorage | torch.TypedStorage)
    instead = "copy values (y.copy_(x), x.clone()) instead of sharing the memory behind a tensor, or do it" if shares else "do it"
    raise CaptureError(
        f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: {taker} is given a "
        f"{kind.__module__}.{kind.__qualname__}, and not only tensors, numbers, texts, dtypes and devices.\n  Fix: "
        f"{instead} in a hook outside the step."
    )


_LITERALS = _LEAVES - {FakeTensor} | {complex, torch.SymInt, torch.SymFloat, torch.SymBool}


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an op that it writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in leaves_of((value,)) if isinstance(leaf, torch.Tensor))
