"""Every op that a function dispatches while it runs on fake tensors, in order, so that its graph can be made afterwards.

The function runs once, under autograd, on fake tensors; nothing below autograd (functionalization, decomposition, the graph) is
done meanwhile. All of that is a function of what is noted here (:mod:`xlatrain.bridge.replay`). That the whole run is known then,
and not op by op, tells which memory is written to at any time: whatever else repeats needs neither functionalization nor tensors.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from xlatrain.bridge.errors import BridgeError
from xlatrain.bridge.fake_results import FakeResult, NotAlike, describe
from xlatrain.bridge.op_log import written_by
from xlatrain.bridge.op_mode import OpMode
from xlatrain.bridge.patches import patched
from xlatrain.bridge.random import RandomStream, draws
from xlatrain.bridge.tracebacks import Origin

_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

Ambient: TypeAlias = tuple[Any, ...]
"""Grad mode, autocast, default dtype and dispatch keys: what an op depends on besides its arguments."""


class NotRecordable(BridgeError):
    """A run that is more than the ops on its tape: it must be captured as it runs."""


@dataclass(eq=False, slots=True)
class Kind:
    """Ops that are alike: the same op with the same literals, of operands that look the same.

    Attributes:
        results: what it returns, None where that must be found out each time.
        container: ``tuple`` or ``list`` of results; None for a single one.
        draws: how many random numbers it draws.
    """

    draws: int = 0
    results: tuple[FakeResult | None, ...] | None = None
    container: type | None = None

    def learn(self, result: Any, operands: Sequence[FakeTensor]) -> None:
        self.container = type(result) if type(result) in (tuple, list) else None
        results = result if self.container else [result]
        try:
            found = tuple(FakeResult.of(one, operands) for one in results)
        except NotAlike:
            return
        own = [one.untyped_storage()._cdata for one, made in zip(results, found, strict=True) if made and made.alias is None]
        if len(set(own)) == len(own):  # views of each other cannot be made one by one
            self.results = found


@dataclass(eq=False, slots=True)
class Entry:
    """One op that ran.

    Attributes:
        result: what it returned.
        kind: None: no other is like it.
        operands: its tensors, in the order of its arguments, where it has a kind.
        draw: the number of its first random draw; of ``draws``.
        ambient: what else it depends on.
        origin: where it was dispatched.
    """

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: Kind | None
    operands: Sequence[FakeTensor]
    draw: int
    draws: int
    ambient: Ambient
    origin: Origin
    result: Any = None


class Tape(OpMode):
    """``with fake_mode, Tape(…) as tape: fn(*fakes)``.

    Args:
        mode: of the function's fake tensors.
        stream: numbers the draws.
        count_draws: ``(func, args, kwargs) -> `` how many numbers an op draws.

    Attributes:
        entries: the ops.
        written: memory that any op may write to, by address.
        changed: that which one did write to.
        reshaped: ids of tensors whose shape or strides an op changed in place.

    Raises:
        NotRecordable: from an op that is more than a function of its arguments.
    """

    def __init__(
        self, mode: FakeTensorMode, stream: RandomStream, count_draws: Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
    ) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.written: set[int] = set()
        self.changed: set[int] = set()
        self.reshaped: set[int] = set()
        self._mode = mode
        self._stream = stream
        self._count_draws = count_draws
        self._kinds: dict[Any, Kind] = {}
        self._refused: NotRecordable | None = None
        self._kept: list[torch.UntypedStorage] = []  # an address must not be used twice

    def op(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or any(kind is not FakeTensor for kind in types):
            self._refuse(f"{func} is more than a function of tensors")
        entry = self._entry(func, args, kwargs)
        kind = entry.kind
        if kind is not None and kind.results is not None:
            made = [None if one is None else one.make(self._mode, entry.operands) for one in kind.results]
            entry.result = made[0] if kind.container is None else kind.container(made)
        else:
            entry.result = self._run(func, args, kwargs)
            if kind is not None:
                kind.learn(entry.result, entry.operands)
        if entry.draws:
            self._stream.index = entry.draw + entry.draws
            self._stream.used = True
        self.entries.append(entry)
        return entry.result

    def _refuse(self, reason: str) -> NoReturn:
        self._refused = NotRecordable(reason)
        raise self._refused

    def _refuse_swap(self, *_: Any) -> NoReturn:
        self._refuse("torch.utils.swap_tensors makes a tensor another one")

    def _entry(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        ambient = _ambient()
        operands: list[FakeTensor] = []
        kind = None
        if not func._schema.is_mutable and func not in _UNSAID and not any(tag in func.tags for tag in _READS):
            try:
                key = _key(func, args, kwargs, ambient, operands)
            except NotAlike:
                pass
            else:
                kind = self._kinds.get(key)
                if kind is None:
                    kind = self._kinds[key] = Kind(self._draws(func, args, kwargs))
        number = self._draws(func, args, kwargs) if kind is None else kind.draws
        first = args[-1] if draws(func) else self._stream.index
        return Entry(func, args, kwargs, kind, operands, first, number, ambient, Origin.here())

    def _draws(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return self._count_draws(func, args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else 0

    def _run(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = list(written_by(func, args, kwargs)) if func._schema.is_mutable else []
        unsaid = [one for one in (args[i] for i in _UNSAID.get(func, ())) if one is not None]
        self._note_written(changed + unsaid)
        result = func(*args, **kwargs)
        self._note_written(changed)  # set_ gives a tensor other memory
        if torch.Tag.inplace_view in func.tags:
            self.reshaped.update(map(id, changed))
        if torch.Tag.inplace_view not in func.tags or func.overloadpacket in _MOVES:
            trains = func is _aten.native_batch_norm.default and args[5]
            self.changed.update(one.untyped_storage()._cdata for one in (changed + unsaid if trains else changed))
        return result

    def _note_written(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.written:
                self.written.add(storage._cdata)
                self._kept.append(storage)

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether any op of the run may write to the memory of ``tensor``."""
        return bool(self.written) and tensor.untyped_storage()._cdata in self.written

    def __enter__(self) -> Tape:
        self._token = _ACTIVE.set(self)
        self._unswapped = patched([(torch._C, "_swap_tensor_impl", self._refuse_swap)])
        self._unswapped.__enter__()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        _ACTIVE.reset(self._token)
        super().__exit__(kind, error, trace)
        self._unswapped.__exit__(kind, error, trace)
        if self._refused is not None and error is not self._refused and (error is None or isinstance(error, Exception)):
            raise self._refused  # and somebody caught it


_ACTIVE: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("xlatrain_tape", default=None)

_aten = torch.ops.aten
_MOVES = (_aten.set_, _aten.resize_, _aten.resize_as_)
"""Change more than shape and strides."""
_UNSAID: dict[Any, tuple[int, ...]] = {
    _aten.native_batch_norm.default: (3, 4),
    _aten.as_strided.default: (0,),
    _aten.as_strided_scatter.default: (0,),
    _aten.as_strided_copy.default: (0,),
}
"""Arguments that count as written though the schema does not say so: running statistics, and where an op depends on the memory
behind a tensor, not only on its elements."""


def is_written(tensor: torch.Tensor) -> bool:
    """Whether the run that is being recorded has written to the memory of ``tensor``."""
    tape = _ACTIVE.get()
    return tape is not None and tensor.untyped_storage()._cdata in tape.changed


def _ambient() -> Ambient:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
    )


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient, operands: list[FakeTensor]) -> Any:
    """What ops that are alike have in common; adds their tensors to ``operands``.

    Raises:
        NotAlike: no other op is like this one.
    """
    words: list[Any] = [func, ambient]
    describe(args[:-1] if draws(func) else args, words, operands)
    for name, value in kwargs.items():
        words.append(name)
        describe(value, words, operands)
    if len(operands) > 1:
        first: dict[int, int] = {}
        words.extend([first.setdefault(id(operand), i) for i, operand in enumerate(operands)])
    return tuple(words)
