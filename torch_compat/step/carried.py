"""Tensors that a step carries from batch to batch in attributes and entries of containers: they are inputs of its programs.

``self.average = 0.9 * self.average + 0.1 * loss.detach()`` reads what the step before has stored. Such a tensor is a leaf beside
those of the batch: whatever is at its place when a step begins. What the step puts there is a value of the program, as always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch

from torch_compat.run.batches import BatchSpec, flatten_batch
from torch_compat.step.effects.effects import Record, is_plain
from torch_compat.step.effects.held_place import HOLDERS, HeldPlace
from torch_compat.step.guards.one_shot_objects import is_iterator
from torch_compat.step.guards.pulled_places import GIVEN, Given, PulledPlace
from torch_compat.step.placed_batch import BatchForm, PlacedBatch, SharedMemory, shared_memory
from torch_compat.step.values.marks import mark
from torch_compat.step.values.names import MISSING
from torch_compat.step.values.taken_values import TAKEN
from xlatrain.bridge.capture.stand_ins import stand_for
from xlatrain.bridge.tensors.lazy import unread_lazy
from xlatrain.bridge.tensors.live import LiveTensors, is_live
from xlatrain.bridge.tensors.strides import strides_of

_MOST_ENTRIES = 16
"""Entries of a list that are inputs each, counted from its end: a list that grows has a program for each length up to this."""


@dataclass(frozen=True)
class CarriedPlace(HeldPlace):
    """A place of which a step reads the tensor that it stores there: an attribute, or an entry of a dict or list.

    There may also be a tuple, list or dict of tensors that the step makes anew.
    """

    def value(self, roots: Mapping[str, Any]) -> Any:
        """The present contents; none of a queue that will be too long."""
        contents = self.contents(roots)
        return MISSING if isinstance(contents, deque) and (contents.maxlen or 0) > _MOST_ENTRIES else super().value(roots)

    def look(self, roots: Mapping[str, Any]) -> tuple[list[torch.Tensor], Hashable]:
        """The tensors that are there, and what else a program depends on; no tensors where they cannot be inputs."""
        value = self.value(roots)
        found, spec = flatten_batch(value)
        if not found or not all(map(is_plain, spec.others)) or not all(map(_is_carried, found)):
            return [], mark(value)
        return found, (spec.key, tuple(map(mark, spec.others)))

    @property
    def attribute(self) -> tuple[str, str] | None:
        """``(owner, attribute)`` in which it is, where that is what the step sets."""
        return self.holder.attribute(self.key) if self.is_attribute else None


def places_of(tensors: Iterable[torch.Tensor], records: Iterable[Record], roots: Mapping[str, Any]) -> tuple[CarriedPlace, ...]:
    """The places that records set where one of these tensors is now."""
    wanted = set(map(id, tensors))
    return tuple(place for place in _set_by(records) if wanted.intersection(map(id, flatten_batch(place.value(roots))[0])))


def tensor_places(records: Iterable[Record], roots: Mapping[str, Any]) -> tuple[CarriedPlace, ...]:
    """The places that records set where tensors are now."""
    return tuple(place for place in _set_by(records) if place.look(roots)[0])


def unread_places(records: Iterable[Record], roots: Mapping[str, Any]) -> tuple[CarriedPlace, ...]:
    """The places that records set where a tensor is now that nobody has read yet, but for entries of lists."""
    places = _set_by(one for one in records if one.kind in ("setattr", "setitem"))
    return tuple(place for place in places if any(map(unread_lazy, place.look(roots)[0])))


def _set_by(records: Iterable[Record]) -> Iterable[CarriedPlace]:
    found: dict[CarriedPlace, None] = {}
    for one in records:
        if one.kind in ("setattr", "setitem"):
            found[CarriedPlace(one.place, one.key, one.kind == "setattr")] = None
        elif one.kind in ("append", "contents"):
            found.update((CarriedPlace(one.place, -number, is_attribute=False), None) for number in range(1, _MOST_ENTRIES + 1))
    return found


def _is_carried(tensor: torch.Tensor) -> bool:
    plain = not is_live(tensor) and not tensor.requires_grad and tensor.layout == torch.strided
    return plain and (unread_lazy(tensor) is not None or tensor.device.type == "cpu")


class CarriedTensors:
    """The tensors that steps carry.

    Args:
        roots: name → object below which the places are.
        put: takes an array, or a host tensor, to all devices of the mesh.
    """

    def __init__(self, roots: Mapping[str, Any], put: Callable[[Any], jax.Array]) -> None:
        self._roots = roots
        self._put = put
        self._places: dict[str, dict[CarriedPlace, None]] = {}
        self._forms: dict[Hashable, BatchForm] = {}

    def add(self, step: str, places: Iterable[CarriedPlace]) -> bool:
        """Carry the tensors at these places from now on; False if all are carried already."""
        known = self._places.setdefault(step, {})
        new = [one for one in places if one not in known]
        for one in new:
            if isinstance(one, PulledPlace):
                known.pop(replace(one, count=one.count - 1), None)
        known.update(dict.fromkeys(new))
        return bool(new)

    def have_run(self, step: str) -> None:
        """A step has run with what it takes of iterators."""
        if pulled := [one for one in self._places.get(step, ()) if isinstance(one, PulledPlace)]:
            TAKEN.have_run(place.iterator() for place in pulled)

    def beside(self, step: str, batch: PlacedBatch, live: LiveTensors) -> PlacedBatch:
        """A batch with the tensors that the step carries beside its own.

        Args:
            live: the module's own tensors.
        """
        known = self._places.get(step)
        if not known:
            return batch
        looks = [(place, *(_pull(place) if isinstance(place, PulledPlace) else place.look(self._roots))) for place in known]
        tensors = [one for _, several, _ in looks for one in several]
        places = tuple((place, len(several)) for place, several, _ in looks if several or isinstance(place, PulledPlace))
        others = tuple((place, bool(several), other) for place, several, other in looks)
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        strides = tuple(map(strides_of, tensors))
        shared = self._shared(batch, tensors, live)
        key = (batch.form, others, shapes, strides, shared)
        if key not in self._forms:
            self._forms[key] = replace(
                batch.form,
                spec=(batch.form.spec, others),
                split=(*batch.form.split, *[False] * len(tensors)),
                shapes=(*batch.form.shapes, *shapes),
                strides=(*batch.form.strides, *strides),
                shared=shared,
            )
        arrays = [self._put(tensor) for tensor in tensors]
        spec = _Beside(batch.spec, places, self._roots)
        return PlacedBatch([*batch.arrays, *arrays], spec, self._forms[key], batch.values, tensors)

    def _shared(self, batch: PlacedBatch, tensors: Sequence[torch.Tensor], live: LiveTensors) -> tuple[SharedMemory, ...]:
        """Which of all tensors have the memory of others, and which carried ones that of the module's own."""
        own = [] if batch.values is None else list(batch.values.leaves)
        if len(own) != len(batch.arrays):
            return ()
        shown = enumerate(zip(tensors, live.shown_by(tensors), strict=True), len(own))
        found = (SharedMemory.between(index, one, of, live.tensor(of)) for index, (one, of) in shown if of is not None)
        return (*shared_memory([*own, *tensors]), *found)


def _pull(place: PulledPlace) -> tuple[list[torch.Tensor], Hashable]:
    """The tensors and the form of an iterator's next batch; see :meth:`CarriedPlace.look`."""
    if not is_iterator(place.iterator()):
        return [], mark(place.iterator())
    tensors, spec = place.pull()
    return tensors, (spec.key, tuple(map(mark, spec.others)))


class _Beside(BatchSpec):
    """The spec of a batch with carried tensors after its own: these are put in their places, while a step is captured."""

    __slots__ = ("_inner", "_places", "_put", "_roots")

    def __init__(self, inner: BatchSpec, places: Collection[tuple[CarriedPlace, int]], roots: Mapping[str, Any]) -> None:
        super().__init__((inner.key, tuple(places)), lambda leaves: None, inner.others)
        self._inner, self._places, self._roots = inner, tuple(places), roots

    def unflatten(self, leaves: Any, other: Any = None) -> Any:
        own = len(leaves) - sum(count for _, count in self._places)
        carried = iter(leaves[own:])
        self._put: list[tuple[Any, CarriedPlace, Any, Any, list[torch.Tensor]]] = []
        for place, count in self._places:
            if isinstance(place, PulledPlace):
                if not is_iterator(place.iterator()):
                    continue
                values = place.pull()[1].unflatten([next(carried) for _ in range(count)])
                GIVEN[id(place.iterator())] = Given(place, values)
                continue
            before = place.value(self._roots)
            kept, spec = flatten_batch(before)
            traced = [stand_for(next(carried), one) for one in kept]
            contents = place.contents(self._roots)
            base: Any = next(kind for kind in HOLDERS if isinstance(contents, kind))  # of the user's own class nothing is called
            put = spec.unflatten(traced)
            base.__setitem__(contents, place.key, put)
            if not isinstance(before, torch.Tensor):
                self._put.append((base, place, before, put, traced))
        return self._inner.unflatten(leaves[:own], other)

    def put_back(self) -> None:
        """Put the lists, dicts and objects in whose places there were others back where they are as they were."""
        for base, place, before, put, traced in self._put:
            now, spec = flatten_batch(put)
            same = len(now) == len(traced) and all(one is other for one, other in zip(now, traced, strict=True))
            contents = place.contents(self._roots)
            if same and place.value(self._roots) is put and spec.key == flatten_batch(before)[1].key:
                base.__setitem__(contents, place.key, before)

    def names(self) -> list[str]:
        of_places = [f"{place}{f' ({number})' if count > 1 else ''}" for place, count in self._places for number in range(count)]
        return [*self._inner.names(), *of_places]
