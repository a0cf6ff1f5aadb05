"""Kinds of ops: what ops that are alike give, found once for all runs of a process, and kept for the next process.

PyTorch computes the look of an op's result by Python functions, most of the time of a run on fake tensors. That is a function of
the op, its literals, the look of its operands and the state of the process in its key, whatever step has the op. Only where all
of it is torch's own: ops of other libraries, and all ops where somebody has given ATen's other kernels, are of one run.

What is kept on disk is a bucket for each form of a run's inputs: the kinds of a run of other inputs are mostly others.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from xlatrain.bridge.capture.op_facts import OpFacts, facts_of, resolve
from xlatrain.bridge.capture.op_log import look_text
from xlatrain.bridge.capture.recorded.fake_results import FakeResult, Fakes, NotAlike
from xlatrain.bridge.capture.recorded.sketches import Sketch
from xlatrain.bridge.capture.torchs_own import implementations_are_torchs, kernels_are_torchs, told_of_torch
from xlatrain.xla import kept_files

Ambient: TypeAlias = tuple[Any, ...]
"""Grad mode, autocast, default dtype, dispatch keys, who draws: what an op depends on besides its arguments."""
Key: TypeAlias = tuple[Any, ...]
"""The op, the ambient, and words on its arguments, in which a whole number is the look of a tensor."""

_KIND = "kinds"
_MOST = 1 << 14
_MOST_KEPT = 1 << 12


@dataclass(eq=False, slots=True)
class Kind:
    """Ops that are alike: the same op with the same literals, of operands that look the same.

    Attributes:
        facts: about the op.
        key: what they have in common.
        draws: how many random numbers it draws.
        text: what logs have of it.
        results: what it returns, None where that must be found out each time.
        looks: how its results look.
        result_texts: what logs have of them.
        container: ``tuple`` or ``list`` of results; None for a single one.
        sketches: of its nodes in a graph, by how its operands look there.
    """

    facts: OpFacts
    key: Key
    draws: int
    text: str | None = None
    results: tuple[FakeResult | None, ...] | None = None
    looks: tuple[int, ...] = ()
    result_texts: tuple[str | None, ...] = ()
    container: type | None = None
    sketches: dict[Any, Sketch] = field(default_factory=dict)

    def learn(self, result: Any, operands: Sequence[FakeTensor], look: Callable[[FakeTensor], int]) -> None:
        """An op of this kind returned ``result``."""
        self.container = type(result) if type(result) in (tuple, list) else None
        results = result if self.container else [result]
        try:
            found = tuple(FakeResult.from_value(one, operands) for one in results)
        except NotAlike:
            return
        own = [one.untyped_storage()._cdata for one, made in zip(results, found, strict=True) if made and made.alias is None]
        if len(set(own)) == len(own):  # views of each other cannot be made one by one
            self.results = found
            self.looks = tuple(-1 if one is None else look(one) for one in results)
            self.result_texts = tuple(None if one is None else look_text(one) for one in results)

    def make(self, fakes: Fakes, operands: Sequence[FakeTensor], looks: dict[int, tuple[FakeTensor, int]]) -> Any:
        """The result of another op of this kind; adds the fingerprints of its tensors to ``looks``, by id."""
        assert self.results is not None
        made: list[FakeTensor | None] = []
        for one, look in zip(self.results, self.looks, strict=True):
            if one is None:
                made.append(None)
                continue
            tensor = one.make(fakes, operands)
            looks[id(tensor)] = (tensor, look)
            made.append(tensor)
        return made[0] if self.container is None else self.container(made)


class KindTable:
    """Kinds, with the numbers of ambients and looks in their keys.

    Attributes:
        kinds: by key.
        counts: how many numbers ops draw, by all that this depends on: each is counted by a trace of its own, which takes long.
    """

    def __init__(self) -> None:
        self.kinds: dict[Key, Kind] = {}
        self.counts: dict[Key, int] = {}
        self._ambients: dict[Ambient, Ambient] = {}
        self._looks: dict[Any, int] = {}
        self._buckets: dict[str, dict[Key, Kind | int]] = {}  # what is on disk

    @property
    def is_full(self) -> bool:
        return len(self.kinds) + len(self.counts) > _MOST

    def ambient(self, found: Ambient) -> Ambient:
        """The one object of all ambients that are equal."""
        return self._ambients.setdefault(found, found)

    def look(self, look: Any) -> int:
        """The number of a look."""
        return self._looks.setdefault(look, len(self._looks))

    def take(self, bucket: str) -> None:
        """Add what another process has kept in ``bucket``."""
        if bucket in self._buckets:
            return
        found = self._buckets[bucket] = {}
        contents = kept_files.read(_KIND, bucket)
        if contents is None:
            return
        try:
            ambients, looks, rows, counts = pickle.loads(contents)
            ops = {name: facts_of(resolve(name)) for name in {row[0] for row in rows} | {key[0] for key in counts}}
            if not implementations_are_torchs(one.func for one in ops.values()):
                return
            numbers, known = dict(enumerate(map(self.look, looks))), list(map(self.ambient, ambients))
            for name, ambient, words, draws, text, results, shown, texts, container in rows:
                facts = ops[name]
                key = (id(facts), id(known[ambient]), *_renumbered(words, numbers))
                made = tuple(None if one is None else FakeResult(*one) for one in results)
                kind = Kind(facts, key, draws, text, made, tuple(_renumbered(shown, numbers)), texts, container)
                found[key] = self.kinds.setdefault(key, kind)
            found.update(counts)
            self.counts.update(counts)
        except Exception as error:
            kept_files.forget(_KIND, bucket, f"{type(error).__name__}: {str(error)[:200]}")

    def keep(self, bucket: str, kinds: Iterable[Kind], counts: Mapping[Key, int]) -> None:
        """Keep the kinds and counts of a run in ``bucket``, where there are new ones among them."""
        known = self._buckets.setdefault(bucket, {})
        new: dict[Key, Kind | int] = {one.key: one for one in kinds if one.key not in known and one.results is not None}
        new.update({key: count for key, count in counts.items() if key not in known})
        if not new or len(known) + len(new) > _MOST_KEPT:
            return
        known.update(new)
        kept = [one for one in known.values() if isinstance(one, Kind)]
        counted = {key: one for key, one in known.items() if isinstance(one, int)}
        if implementations_are_torchs(one.facts.func for one in kept):
            kept_files.write(_KIND, bucket, self._contents(kept, counted))

    def _contents(self, kinds: Sequence[Kind], counts: dict[Key, int]) -> bytes:
        places = {id(one): place for place, one in enumerate(self._ambients)}
        numbers: dict[int, int] = {}
        for kind in kinds:
            for word in (*kind.key[2:], *kind.looks):
                if type(word) is int:
                    numbers.setdefault(word if word >= 0 else ~word, len(numbers))
        rows = []
        for kind in kinds:
            assert kind.results is not None
            made = [None if one is None else (one.shape, one.stride, one.offset, one.dtype, one.alias) for one in kind.results]
            shown = _renumbered(kind.looks, numbers)
            told = (kind.draws, kind.text, made, shown, kind.result_texts, kind.container)
            rows.append((kind.facts.name, places[kind.key[1]], _renumbered(kind.key[2:], numbers), *told))
        looks = list(self._looks)
        used = [(looks[one][0], tuple(looks[one][1]), *looks[one][2:]) for one in numbers]
        return pickle.dumps((list(self._ambients), used, rows, counts))


def _renumbered(words: Iterable[Any], numbers: Mapping[int, int]) -> list[Any]:
    """Words with other numbers for the looks among them."""
    return [(numbers[one] if one >= 0 else ~numbers[~one]) if type(one) is int else one for one in words]


_shared = KindTable()


def table_of_run() -> KindTable:
    """The kinds that a run which begins now adds to: those of all runs, where all is torch's own."""
    global _shared
    if not kernels_are_torchs():
        return KindTable()
    if _shared.is_full:
        _shared = KindTable()  # runs that go on have the old one
    return _shared


def bucket_of(table: KindTable, inputs: Sequence[torch.Tensor]) -> str | None:
    """Where the kinds of a run with inputs like these are kept; None where they are not."""
    if table is not _shared or not kept_files.are_kept():
        return None
    looks = [f"{one.dtype}{tuple(one.shape)}{one.stride()}{one.requires_grad}" for one in inputs]
    return kept_files.key_of(_KIND, told_of_torch(), *looks)
