"""Every op that a function dispatches while it runs on fake tensors, in order, so that its graph can be made afterwards.

The function runs once, under autograd, on fake tensors; nothing below autograd (functionalization, decomposition, the graph) is
done meanwhile. All of that is a function of what is noted here (:mod:`xlatrain.bridge.capture.recorded.replay`). That the whole
run is known then, and not op by op, tells which memory is written to at any time: whatever else repeats needs neither
functionalization nor tensors.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from xlatrain.bridge.capture.cut import UnknownValueError, noted
from xlatrain.bridge.capture.op_facts import OpFacts, OpMode, facts_of
from xlatrain.bridge.capture.op_log import RECORDER, OpLog, leaves_of, outline, written_by
from xlatrain.bridge.capture.recorded.fake_results import Fakes, NotAlike, describe, look_without_grad
from xlatrain.bridge.capture.recorded.kinds import Ambient, Key, Kind, KindTable
from xlatrain.bridge.capture.sized_ops import NEEDS_VALUES, answered
from xlatrain.bridge.capture.tracebacks import Origin
from xlatrain.bridge.errors import BridgeError
from xlatrain.bridge.patches import patched
from xlatrain.bridge.random import RandomStream
from xlatrain.bridge.tensors.strides import is_whole

_FAKE = frozenset((FakeTensor,))


class NotRecordable(BridgeError):
    """A run that is more than the ops on its tape: it must be captured as it runs."""


@dataclass(eq=False, slots=True)
class Entry:
    """An op that ran.

    Attributes:
        facts: about the op.
        result: what it returned.
        kind: None: no other is like it.
        operands: its tensors, in the order of its arguments, where it has a kind.
        draw: the number of its first random draw; of ``draws``.
        ambient: what else it depends on.
        origin: where it was dispatched.
    """

    facts: OpFacts
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
    """A mode that records every op of a run on fake tensors: ``with fake_mode, Tape(…) as tape: fn(*fakes)``.

    Args:
        mode: of the function's fake tensors.
        kinds: that are known.
        stream: numbers the draws.
        count_draws: ``(func, args, kwargs) -> `` how many numbers an op draws.

    Attributes:
        entries: the ops.
        written: memory that any op may write to, by address.
        changed: that which one did write to.
        reshaped: ids of tensors whose shape or strides an op changed in place.
        logs: told of every op.
        counted: of the counts of draws, those that it had.

    Raises:
        NotRecordable: from an op that is more than a function of its arguments.
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        kinds: KindTable,
        stream: RandomStream,
        count_draws: Callable[[Any, tuple[Any, ...], dict[str, Any]], int],
    ) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.written: set[int] = set()
        self.changed: set[int] = set()
        self.reshaped: set[int] = set()
        self.logs: list[OpLog] = []
        self._fakes = Fakes(mode)
        self._stream = stream
        self._count_draws = count_draws
        self.counted: dict[Key, int] = {}
        self._table = kinds
        self._own: dict[Key, Kind] = {}  # of ops that may do something else in another run
        self._looks: dict[int, tuple[FakeTensor, int]] = {}  # with the tensor: an id must not be used twice
        self._refused: NotRecordable | None = None
        self._kept: list[torch.UntypedStorage] = []  # an address must not be used twice

    def op(self, facts: OpFacts, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not facts.plain or not (_FAKE.issuperset(types) or all(issubclass(kind, FakeTensor) for kind in types)):
            self._refuse(f"{facts.func} is more than a function of tensors")
        if facts.func in NEEDS_VALUES and (found := self._answered(facts, args, kwargs)) is not NotImplemented:
            return found
        entry = self._entry(facts, args, kwargs)
        kind = entry.kind
        self._tell_call(facts, entry)
        if kind is not None and kind.results is not None:
            entry.result = kind.make(self._fakes, entry.operands, self._looks)
            for log in self.logs:
                log.note_made(entry.result, kind.result_texts)
        else:
            entry.result = self._run(facts, args, kwargs)
            if kind is not None:
                kind.learn(entry.result, entry.operands, self._look)
            for log in self.logs:
                log.note_results(entry.result)
        if entry.draws:
            self._stream.index = entry.draw + entry.draws
            self._stream.used = True
        self.entries.append(entry)
        return entry.result

    def _answered(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op that may need values, of those that are known; NotImplemented where it goes without."""

        def call(func: Any, *args: Any, **kwargs: Any) -> Any:
            return self.op(facts_of(func), (), args, kwargs)

        try:
            return answered(facts.func, call, args, kwargs)
        except UnknownValueError:
            return NotImplemented

    def _tell_call(self, facts: OpFacts, entry: Entry) -> None:
        if not self.logs:
            return
        text = None if entry.kind is None else entry.kind.text
        operands: Sequence[torch.Tensor] = entry.operands
        if text is None:
            text, operands = outline(facts, entry.args, entry.kwargs)
            if entry.kind is not None and not facts.draws:
                entry.kind.text = text
        for log in self.logs:
            log.note_call(text, operands)
            log.check_written(facts, entry.args, entry.kwargs)

    def _refuse(self, reason: str) -> NoReturn:
        self._refused = NotRecordable(reason)
        raise self._refused

    def _refuse_swap(self, *_: Any) -> NoReturn:
        self._refuse("torch.utils.swap_tensors makes a tensor another one")

    def _entry(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        ambient = self._ambient()
        operands: list[FakeTensor] = []
        kind = None
        if not (facts.mutable or facts.unsaid or facts.reads):
            try:
                key = self._key(facts, args, kwargs, ambient, operands)
            except NotAlike:
                pass
            else:
                kinds = self._table.kinds if facts.known else self._own
                kind = kinds.get(key)
                if kind is None:
                    kind = kinds[key] = Kind(facts, key, self._draws(facts, args, kwargs))
        number = self._draws(facts, args, kwargs) if kind is None else kind.draws
        first = args[-1] if facts.draws else self._stream.index
        return Entry(facts, args, kwargs, kind, operands, first, number, ambient, Origin.here())

    def _ambient(self) -> Ambient:
        """The state besides its arguments that an op dispatched now depends on."""
        found = (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_default_dtype(),
            torch._C._dispatch_tls_local_include_set().raw_repr(),
            torch._C._dispatch_tls_local_exclude_set().raw_repr(),
            torch.are_deterministic_algorithms_enabled(),
            self._stream.by_torch,
            torch.backends.mkldnn.enabled,  # which decides how results of convolutions lie in memory
        )
        return self._table.ambient(found)

    def _key(
        self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], ambient: Ambient, operands: list[FakeTensor]
    ) -> Key:
        """The properties that ops which are alike have in common; adds their tensors to ``operands``.

        Raises:
            NotAlike: no other op is like this one.
        """
        words: list[Any] = [id(facts), id(ambient)]
        describe(args[:-1] if facts.draws else args, words, operands, self._look)
        for name, value in kwargs.items():
            words.append(name)
            describe(value, words, operands, self._look)
        if len(operands) > 1:
            first: dict[int, int] = {}
            words.append(tuple([first.setdefault(id(operand), i) for i, operand in enumerate(operands)]))
        return tuple(words)

    def _look(self, tensor: FakeTensor) -> int:
        """A number that tensors have in common that look the same; its opposite for those that require a gradient."""
        known = self._looks.get(id(tensor))
        if known is None:
            look = look_without_grad(tensor)
            known = self._looks[id(tensor)] = (tensor, self._table.look(look))
        return ~known[1] if tensor.requires_grad else known[1]

    def _draws(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if not facts.seeded:
            return 0
        words: list[Any] = [facts.name, self._ambient()]
        try:
            describe((args, *kwargs.items()), words, [], look_without_grad)
        except NotAlike:
            return self._count_draws(facts.func, args, kwargs)
        counts, key = self._table.counts if facts.known else {}, tuple(words)
        if key not in counts:
            counts[key] = self._count_draws(facts.func, args, kwargs)
        if facts.known:
            self.counted[key] = counts[key]
        return counts[key]

    def _run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = list(written_by(facts.func, args, kwargs)) if facts.mutable else []
        unsaid = [one for one in (args[i] for i in facts.unsaid) if one is not None]
        self._note_written(changed + unsaid)
        result = facts.func(*args, **kwargs)
        self._note_written(changed)  # set_ gives a tensor other memory
        for tensor in changed:
            self._looks.pop(id(tensor), None)
        if facts.reshapes:
            self.reshaped.update(map(id, changed))
        if facts.writes_elements:
            trains = facts.running and args[5]
            self.changed.update(one.untyped_storage()._cdata for one in (changed + unsaid if trains else changed))
        return result

    def _note_written(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note the storages of ``tensors`` as written to, and keep them alive, so that no address is used twice."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.written:
                self.written.add(storage._cdata)
                self._kept.append(storage)

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Whether any op of the run may write to the memory of ``tensor``."""
        return bool(self.written) and tensor.untyped_storage()._cdata in self.written

    def __enter__(self) -> Tape:
        self._tokens = _ACTIVE.set(self), RECORDER.set(self)
        self._noted = noted(self.entries)
        self._noted.__enter__()
        self._unswapped = patched([(torch._C, "_swap_tensor_impl", self._refuse_swap)])
        self._unswapped.__enter__()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._noted.__exit__(kind, error, trace)
        _ACTIVE.reset(self._tokens[0])
        RECORDER.reset(self._tokens[1])
        super().__exit__(kind, error, trace)
        self._unswapped.__exit__(kind, error, trace)
        if self._refused is not None and error is not self._refused and (error is None or isinstance(error, Exception)):
            raise self._refused  # user code has caught the error of the refusal


_ACTIVE: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("xlatrain_tape", default=None)


def is_written(tensor: torch.Tensor) -> bool:
    """Whether the run that is being recorded has written to the memory of ``tensor``."""
    tape = _ACTIVE.get()
    return tape is not None and tensor.untyped_storage()._cdata in tape.changed


def ops_so_far() -> int:
    """How many ops the run that is being recorded has had; 0 without one."""
    tape = _ACTIVE.get()
    return 0 if tape is None else len(tape.entries)


def uses_since(tensor: torch.Tensor, since: int) -> bool:
    """Whether the run has used the memory of ``tensor`` after so many ops; True where nothing is recorded."""
    tape = _ACTIVE.get()
    if tape is None:
        return True
    memory = _memory(tensor)
    given = (leaf for entry in tape.entries[since:] for leaf in leaves_of((entry.args, entry.kwargs)))
    return any(isinstance(one, torch.Tensor) and _memory(one) == memory for one in given)


def first_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with which the memory of ``tensor`` came about in the run that is being recorded; None where there is none."""
    tape = _ACTIVE.get()
    made = (leaf for entry in ([] if tape is None else tape.entries) for leaf in leaves_of(entry.result))
    found = next((one for one in made if isinstance(one, torch.Tensor) and _memory(one) == _memory(tensor)), None)
    return found if found is not None and is_whole(found) else None


def have_parted(copy: torch.Tensor, source: torch.Tensor, since: int, *, put_back: bool = False) -> bool:
    """Whether the run that is being recorded would see that ``copy``, which an op of it made, is no view of ``source``.

    It has written to the copy, or to the source and then used the copy.

    Args:
        copy, source: tensors.
        since: after how many ops of the run they had the same elements.
        put_back: the copy is about to be written to its place in the source, so that it may be changed as long as nobody has
            used the source since.
    """
    tape = _ACTIVE.get()
    if tape is None or not tape.changed & {_memory(copy), _memory(source)}:
        return False
    is_old = is_ahead = False
    for entry in tape.entries[since:]:
        used = {_memory(leaf) for leaf in leaves_of((entry.args, entry.kwargs)) if isinstance(leaf, torch.Tensor)}
        if (is_old and _memory(copy) in used) or (is_ahead and _memory(source) in used):
            return True
        if entry.facts.writes_elements:
            written = {_memory(one) for one in written_by(entry.facts.func, entry.args, entry.kwargs)}
            if _memory(copy) in written and not put_back:
                return True
            is_ahead = is_ahead or _memory(copy) in written
            is_old = is_old or _memory(source) in written
    return put_back and is_old


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
