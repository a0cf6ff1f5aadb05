"""Tensors that a step carries from batch to batch in attributes and entries of containers: they are inputs of its programs.

``self.average = 0.9 * self.average + 0.1 * loss.detach()`` reads what the step before has stored. Such a tensor is a leaf beside
those of the batch: whatever is at its place when a step begins. What the step puts there is a value of the program, as always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch
import torch.utils._pytree as pytree

from torch_compat.run.batches import BatchSpec
from torch_compat.step.effects.effects import ObjectPath, Record, is_plain
from torch_compat.step.placed_batch import BatchForm, PlacedBatch
from torch_compat.step.values.marks import mark
from torch_compat.step.values.names import MISSING
from xlatrain.bridge.capture.stand_ins import stand_for
from xlatrain.bridge.tensors.live import unread_lazy
from xlatrain.bridge.tensors.strides import strides_of

_MOST_ENTRIES = 16
"""Entries of a list that are inputs each, counted from its end: a list that grows has a program for each length up to this."""


@dataclass(frozen=True)
class CarriedPlace:
    """A place of which a step reads the tensor that it stores there: an attribute, or an entry of a dict or list.

    There may also be a tuple, list or dict of tensors that the step makes anew.
    """

    holder: ObjectPath
    key: Any
    is_attribute: bool

    def contents(self, roots: Mapping[str, Any]) -> Any:
        """The dict, list or deque that has it."""
        try:
            found = self.holder.find(roots, strictly=True)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None
        return found.__dict__ if self.is_attribute else found if isinstance(found, _HOLDERS) else None

    def value(self, roots: Mapping[str, Any]) -> Any:
        """The present contents."""
        contents = self.contents(roots)
        if isinstance(contents, dict):
            return contents.get(self.key, MISSING)
        too_long = isinstance(contents, deque) and (contents.maxlen or 0) > _MOST_ENTRIES  # it will be
        return contents[self.key] if contents is not None and len(contents) >= -self.key and not too_long else MISSING

    def look(self, roots: Mapping[str, Any]) -> tuple[list[torch.Tensor], Hashable]:
        """The tensors that are there, and what else a program depends on; no tensors where they cannot be inputs."""
        value = self.value(roots)
        leaves, structure = ([value], None) if isinstance(value, torch.Tensor) else pytree.tree_flatten(value)
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if not found or not all(map(is_plain, others)) or not all(map(_is_carried, found)):
            return [], mark(value)
        return found, (structure, tuple(map(mark, others)))

    def __str__(self) -> str:
        return f"{self.holder}.{self.key}" if self.is_attribute else f"{self.holder}[{self.key!r}]"

    @property
    def attribute(self) -> tuple[str, str] | None:
        """``(owner, attribute)`` in which it is, where that is what the step sets."""
        return self.holder.attribute(self.key) if self.is_attribute else None


_HOLDERS = (dict, list, deque)


def places_of(tensors: Iterable[torch.Tensor], records: Iterable[Record], roots: Mapping[str, Any]) -> tuple[CarriedPlace, ...]:
    """The places that records set where one of these tensors is now."""
    wanted = set(map(id, tensors))
    return tuple(place for place in _set_by(records) if wanted.intersection(map(id, pytree.tree_leaves(place.value(roots)))))


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
    plain = not tensor.requires_grad and tensor.layout == torch.strided
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
        before = len(known)
        known.update(dict.fromkeys(places))
        return len(known) > before

    def beside(self, step: str, batch: PlacedBatch) -> PlacedBatch:
        """A batch with the tensors that the step carries beside its own."""
        known = self._places.get(step)
        if not known:
            return batch
        looks = [(place, *place.look(self._roots)) for place in known]
        tensors = [one for _, several, _ in looks for one in several]
        places = tuple((place, len(several)) for place, several, _ in looks if several)
        others = tuple((place, bool(several), other) for place, several, other in looks)
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        strides = tuple(map(strides_of, tensors))
        key = (batch.form, others, shapes, strides)
        if key not in self._forms:
            self._forms[key] = replace(
                batch.form,
                spec=(batch.form.spec, others),
                split=(*batch.form.split, *[False] * len(tensors)),
                shapes=(*batch.form.shapes, *shapes),
                strides=(*batch.form.strides, *strides),
            )
        arrays = [self._put(tensor) for tensor in tensors]
        return PlacedBatch([*batch.arrays, *arrays], _Beside(batch.spec, places, self._roots), self._forms[key], batch.values)


class _Beside(BatchSpec):
    """The spec of a batch with carried tensors after its own: these are put in their places, while a step is captured."""

    __slots__ = ("_inner", "_places", "_roots")

    def __init__(self, inner: BatchSpec, places: Collection[tuple[CarriedPlace, int]], roots: Mapping[str, Any]) -> None:
        super().__init__((inner.key, tuple(places)), lambda leaves: None, inner.others)
        self._inner, self._places, self._roots = inner, tuple(places), roots

    def unflatten(self, leaves: Any, other: Any = None) -> Any:
        own = len(leaves) - sum(count for _, count in self._places)
        carried = iter(leaves[own:])
        for place, _ in self._places:
            kept, structure = pytree.tree_flatten(place.value(self._roots))
            traced = [stand_for(next(carried), one) if isinstance(one, torch.Tensor) else one for one in kept]
            contents = place.contents(self._roots)
            base: Any = next(kind for kind in _HOLDERS if isinstance(contents, kind))  # of the user's own class nothing is called
            base.__setitem__(contents, place.key, pytree.tree_unflatten(traced, structure))
        return self._inner.unflatten(leaves[:own], other)

    def names(self) -> list[str]:
        of_places = [f"{place}{f' ({number})' if count > 1 else ''}" for place, count in self._places for number in range(count)]
        return [*self._inner.names(), *of_places]
