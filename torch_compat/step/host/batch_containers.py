"""Changes that a step makes in the containers of its batch: ``batch["x"] = …``, ``batch.pop("labels")``.

A captured step has copies of them. What it changed there is changed in the user's own after each step, where hooks, and the
next epoch of a dataset that keeps its batches, see it.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from torch_compat.step.host.batch_texts import TracedTexts
from torch_compat.step.host.slots import BatchSlot
from torch_compat.step.values.marks import slots
from torch_compat.step.values.user_objects import attributes_of, is_user_object
from xlatrain.bridge.errors import CaptureError

_Names = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class BatchChange:
    """A change of a container of the batch.

    Attributes:
        names: keys, indices and attributes that lead to it.
        gone: of its entries.
        put: new entries, with slots; a list that has lost some has all of its entries here.
        added: at the end of a list, with slots.
    """

    names: _Names
    gone: tuple[Any, ...]
    put: dict[Any, Any]
    added: list[Any]

    def make(self, batch: Any, fill: Callable[[Any], Any]) -> None:
        """Change the user's ``batch``; ``fill`` puts values into slots."""
        container = container_at(batch, self.names)
        put, added = fill((self.put, self.added))
        if isinstance(container, list) and self.gone:
            container[:] = put.values()
        elif isinstance(container, list | dict | UserDict):
            for name in self.gone:
                del container[name]
            for name, value in put.items():
                container[name] = value
            if isinstance(container, list):
                container += added
        else:
            for name in self.gone:
                object.__delattr__(container, name)
            for name, value in put.items():
                object.__setattr__(container, name, value)


def container_at(batch: Any, names: _Names) -> Any:
    """The container of a batch to which ``names`` lead."""
    for name in names:
        batch = _held(batch)[name]
    return batch


class BatchContainers:
    """The containers of the batch that a capture gives to a step.

    Args:
        batch: before the step.
        others: leaves that are no tensors, which are the user's own.
    """

    def __init__(self, batch: Any, others: Sequence[Any]) -> None:
        met: set[int] = set()
        list(_containers(others, (), met))  # the step has the very objects: what it does with them is followed elsewhere
        self._found = list(_containers(batch, (), met))

    def slots(self) -> dict[int, BatchSlot]:
        """By id of each container: the slot for the user's own."""
        return {id(container): BatchSlot(names) for names, container, _ in self._found}

    def kept(self) -> list[Any]:
        """The entries that the step has left in the containers."""
        return [one for _, container, _ in self._found for one in _held(container).values()]

    def changes(self, template: Callable[[Any], Any]) -> list[BatchChange]:
        """The changes until now.

        Args:
            template: puts slots into new entries.

        Raises:
            CaptureError: a container of the batch is at another place, or a list of texts has lost some.
        """
        made = {id(container) for _, container, _ in self._found}
        found = []
        for names, container, before in self._found:
            now = _held(container)
            if now.keys() == before.keys() and all(now[name] is before[name] for name in now):
                continue
            gone = tuple(name for name in before if name not in now)
            is_list = isinstance(container, list)
            put = {name: value for name, value in now.items() if (is_list and gone) or before.get(name, before) is not value}
            if gone and type(container) is TracedTexts:
                raise CaptureError(
                    "the step takes entries out of a list of its batch that holds no tensors, which a compiled step does not "
                    "follow: make a new list of those that stay"
                )
            if any(id(one) in made for one in pytree.tree_leaves(put, is_leaf=lambda one: id(one) in made)):
                raise CaptureError(
                    "the step puts a list, dict or object of its batch into another place of the batch; a compiled step has a "
                    "copy of it. Put its tensors there, or make a new one"
                )
            added = [] if not is_list or gone else [put.pop(index) for index in range(len(before), len(now))]
            found.append(BatchChange(names, gone, *template((put, added))))
        return found


def _containers(value: Any, names: _Names, met: set[int]) -> Iterator[tuple[_Names, Any, dict[Any, Any]]]:
    """Names, container and entries of each, but of those whose ids are in ``met``: objects may know one another in a circle."""
    held = {} if id(value) in met else _held(value)
    if held:
        met.add(id(value))
    if held and not isinstance(value, tuple):
        yield names, value, held
    for name, child in held.items():
        yield from _containers(child, (*names, name), met)


def _held(value: Any) -> dict[Any, Any]:
    """Entries of a container by name, none of what is no container. Asks no code of a subclass, which may note what is asked."""
    if isinstance(value, UserDict):
        value = value.data
    if isinstance(value, torch.Tensor):
        return {}
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list):
        return dict(enumerate(list.__iter__(value)))
    if isinstance(value, tuple):
        return dict(enumerate(tuple.__iter__(value)))
    of_user = is_user_object(value) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    if not of_user or isinstance(value, torch.nn.Module):
        return {}
    apart = {name: getattr(value, name) for name in slots(type(value)) if hasattr(value, name)}  # dataclass(slots=True)
    return {**(attributes_of(value) or {}), **apart}
