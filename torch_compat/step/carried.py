"""Tensors that a step carries from batch to batch in attributes and under keys of dicts: they are inputs of its programs.

``self.average = 0.9 * self.average + 0.1 * loss.detach()`` reads what the step before has stored. Such a tensor is a leaf beside
those of the batch: whatever is at its place when a step begins. What the step puts there is a value of the program, as always.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import torch

from torch_compat.run.batches import BatchSpec
from torch_compat.step.effects.effects import ObjectPath, Record
from torch_compat.step.placed_batch import BatchForm, PlacedBatch
from xlatrain.bridge.tensors.live import unread_lazy
from xlatrain.bridge.tensors.strides import strides_of


@dataclass(frozen=True)
class CarriedPlace:
    """A place of which a step reads the tensor that it stores there: an attribute, or an entry of a dict."""

    holder: ObjectPath
    key: Any
    is_attribute: bool

    def contents(self, roots: Mapping[str, Any]) -> dict[Any, Any] | None:
        """The dict that has it."""
        try:
            found = self.holder.find(roots, strictly=True)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None
        return found.__dict__ if self.is_attribute else found if isinstance(found, dict) else None

    def value(self, roots: Mapping[str, Any]) -> Any:
        """The present contents: a tensor, or anything else; None where nothing is."""
        return (self.contents(roots) or {}).get(self.key)

    def __str__(self) -> str:
        return f"{self.holder}.{self.key}" if self.is_attribute else f"{self.holder}[{self.key!r}]"

    @property
    def attribute(self) -> tuple[str, str] | None:
        """``(owner, attribute)`` in which it is, where that is what the step sets."""
        return self.holder.attribute(self.key) if self.is_attribute else None


def places_of(tensors: Iterable[torch.Tensor], records: Iterable[Record], roots: Mapping[str, Any]) -> tuple[CarriedPlace, ...]:
    """The places that records set where one of these tensors is now."""
    wanted = set(map(id, tensors))
    return tuple(place for place in _set_by(records) if id(place.value(roots)) in wanted)


def unread_places(records: Iterable[Record], roots: Mapping[str, Any]) -> tuple[CarriedPlace, ...]:
    """The places that records set where a tensor is now that nobody has read yet."""
    return tuple(place for place in _set_by(records) if unread_lazy(place.value(roots)) is not None)


def _set_by(records: Iterable[Record]) -> Iterable[CarriedPlace]:
    set_by = [one for one in records if one.kind in ("setattr", "setitem")]
    return dict.fromkeys(CarriedPlace(one.place, one.key, one.kind == "setattr") for one in set_by)


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
        found = [(place, tensor) for place in self._places.get(step, ()) if (tensor := self._tensor(place)) is not None]
        if not found:
            return batch
        places = tuple(place for place, _ in found)
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for _, tensor in found)
        strides = tuple(strides_of(tensor) for _, tensor in found)
        key = (batch.form, places, shapes, strides)
        if key not in self._forms:
            self._forms[key] = replace(
                batch.form,
                spec=(batch.form.spec, places),
                split=(*batch.form.split, *[False] * len(found)),
                shapes=(*batch.form.shapes, *shapes),
                strides=(*batch.form.strides, *strides),
            )
        arrays = [self._put(tensor) for _, tensor in found]
        return PlacedBatch([*batch.arrays, *arrays], _Beside(batch.spec, places, self._roots), self._forms[key], batch.values)

    def _tensor(self, place: CarriedPlace) -> torch.Tensor | None:
        found = place.value(self._roots)
        plain = isinstance(found, torch.Tensor) and not found.requires_grad and found.layout == torch.strided
        return found if plain and (unread_lazy(found) is not None or found.device.type == "cpu") else None


class _Beside(BatchSpec):
    """The spec of a batch with carried tensors after its own: these are put in their places, while a step is captured."""

    __slots__ = ("_inner", "_places", "_roots")

    def __init__(self, inner: BatchSpec, places: Collection[CarriedPlace], roots: Mapping[str, Any]) -> None:
        super().__init__((inner.key, tuple(places)), lambda leaves: None, inner.others)
        self._inner, self._places, self._roots = inner, tuple(places), roots

    def unflatten(self, leaves: Any, other: Any = None) -> Any:
        own = len(leaves) - len(self._places)
        for place, leaf in zip(self._places, leaves[own:], strict=True):
            contents = place.contents(self._roots)
            assert contents is not None
            dict.__setitem__(contents, place.key, leaf)
        return self._inner.unflatten(leaves[:own], other)

    def names(self) -> list[str]:
        return [*self._inner.names(), *map(str, self._places)]
