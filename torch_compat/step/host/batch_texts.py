"""Batch leaves besides tensors (strings, ids, lists of them), as the Python of a captured step sees them.

Such a leaf may pass through a step to a metric, a logger, a list or the result, and then never matters to the program. What
the step's Python reads of it (a comparison, a length, a look-up in a dict) is a guard: another value uses, or captures, another
variant. A string that was taken out of its list, dict or object and then neither read nor passed on was read by something that
does not show it (a tokenizer's compiled code), so it is a guard as well.
"""

from __future__ import annotations

import functools
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree

from torch_compat.step.host.batch_values import comparable
from torch_compat.step.host.scalars import HostScalar, ScalarTracer

Path = tuple[Any, ...]


class BatchTexts:
    """Wraps the leaves of one batch for one capture.

    Args:
        tracer: takes the guards.
    """

    def __init__(self, tracer: ScalarTracer) -> None:
        self._tracer = tracer
        self._taken: dict[Path, str] = {}
        self._accounted: set[Path] = set()

    def wrap_leaf(self, value: Any, index: int) -> Any:
        """The ``index``-th leaf that is no tensor, as the step sees it."""
        return self.wrap(value, (index,))

    def wrap(self, value: Any, path: Path) -> Any:
        """``value``, which is at ``path`` of the batch's other leaves, as the step sees it."""
        kind = type(value)
        if kind is str:
            return TracedText(value, self, path)
        if kind is list or kind is tuple:
            return TracedTexts(value, self, path)
        if kind is dict:
            self.read(path, "keys", _keys)
            return self._watched_dict({key: self.wrap(item, (*path, key)) for key, item in value.items()})
        if len(path) > 1 and kind in (int, float):  # numbers at the top select the variant
            return HostScalar(self._tracer, lambda host_values: _find(host_values.others, path), _name(path), value)
        if len(path) > 1 and isinstance(value, bool | np.ndarray | np.generic):
            self.read(path, "value", comparable)
        return value

    def watch(self, value: Any) -> Any:
        """A batch of wrapped leaves, or a part of it, that notes which of its strings are taken out.

        Those of a tuple or list are taken out by unpacking it, so they count as taken.
        """
        kind = type(value)
        if kind is TracedTexts:
            return value
        if kind is dict:
            return self._watched_dict({key: self.watch(item) for key, item in value.items()})
        if kind is list or kind is tuple:
            return kind([_taken(self.watch(item)) for item in value])
        if isinstance(value, Mapping | list | tuple):
            for item in value.values() if isinstance(value, Mapping) else value:
                _taken(item)
        elif not isinstance(value, torch.Tensor | str) and any(type(item) is TracedText for item in _attributes(value)):
            object.__setattr__(value, "__class__", _watched_class(kind))
        return value

    def _watched_dict(self, entries: dict[Any, Any]) -> dict[Any, Any]:
        return TracedDict(entries) if any(type(item) is TracedText for item in entries.values()) else entries

    def read(self, path: Path, what: str, of: Any) -> None:
        """Guard on ``of`` the leaf at ``path``."""
        self._tracer.guard(lambda host_values: of(_find(host_values.others, path)), f"{what} of {_name(path)}")
        if of is not _length:
            self._accounted.add(path)

    def take(self, path: Path, text: str) -> None:
        """A string was taken out of its list."""
        self._taken[path] = text

    def account(self, path: Path) -> None:
        """The leaf at ``path`` goes to where its value of each step is put."""
        self._accounted.add(path)

    def finish(self) -> None:
        """Guard on the strings that went nowhere that is known."""
        for path in self._taken:
            if not any(path[: length + 1] in self._accounted for length in range(len(path))):
                self.read(path, "value", comparable)


def _find(others: Any, path: Path) -> Any:
    try:
        return functools.reduce(lambda value, key: value[key], path, others)
    except (IndexError, KeyError, TypeError):
        return None  # a guard on it does not hold


def _name(path: Path) -> str:
    return f"batch leaf {path[0]}{''.join(f'[{key!r}]' for key in path[1:])}"


def _keys(value: Any) -> Any:
    return tuple(value) if isinstance(value, Mapping) else None


def _length(value: Any) -> Any:
    return len(value) if isinstance(value, list | tuple) else None


class TracedText(str):
    """A string of the batch; every look at it is a guard."""

    def __new__(cls, value: str, texts: BatchTexts, path: Path) -> TracedText:
        made = super().__new__(cls, value)
        made.__dict__.update(texts=texts, path=path)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, (plain(self),)


def _guarded(name: str) -> Any:
    original = getattr(str, name)

    def method(self: TracedText, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["texts"].read(self.__dict__["path"], "value", comparable)
        return original(str.__str__(self), *args, **kwargs)

    return method


_UNTOUCHED = ("__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__", "__doc__", "__dir__")
_UNTOUCHED += ("__init_subclass__", "__subclasshook__", "__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__")
_UNTOUCHED += ("__sizeof__", "maketrans")
for _name_of_method in dir(str):
    if _name_of_method not in _UNTOUCHED:
        setattr(TracedText, _name_of_method, _guarded(_name_of_method))


class TracedTexts(list):
    """A list or tuple of a batch that holds no tensors; its length is a guard where it is asked for, its items are traced too."""

    def __init__(self, values: Any, texts: BatchTexts, path: Path) -> None:
        super().__init__(values)
        self.texts = texts
        self.path = path
        self.kind = type(values)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.kind

    def _item(self, index: int) -> Any:
        index = range(list.__len__(self))[index]
        path = (*self.path, index)
        item = self.texts.wrap(list.__getitem__(self, index), path)
        if isinstance(item, str):
            self.texts.take(path, item)
        return item

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._item(one) for one in range(len(self))[index]]
        return self._item(index)

    def __len__(self) -> int:
        self.texts.read(self.path, "length", _length)
        return list.__len__(self)

    def __iter__(self) -> Iterator[Any]:
        return (self._item(index) for index in range(len(self)))

    def __bool__(self) -> bool:
        return len(self) > 0

    def __contains__(self, item: Any) -> bool:
        return any(one == item for one in self)

    def __eq__(self, other: Any) -> bool:
        return list(self) == list(other)

    def __ne__(self, other: Any) -> bool:
        return not self == other

    __hash__ = None

    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return [*other, *self]

    def __repr__(self) -> str:
        self.texts.read(self.path, "value", comparable)
        return list.__repr__(self)

    def index(self, *args: Any) -> int:
        return list(self).index(*args)

    def count(self, item: Any) -> int:
        return list(self).count(item)

    def copy(self) -> Any:
        return list(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (plain(self),)


def _taken(item: Any) -> Any:
    """``item``, marked as taken out of the batch."""
    if type(item) is TracedText:
        item.__dict__["texts"].take(item.__dict__["path"], item)
    return item


class TracedDict(dict):
    """A dict with strings of the batch in it: getting a string counts as taking it out."""

    def __getitem__(self, key: Any) -> Any:
        return _taken(dict.__getitem__(self, key))

    def __iter__(self) -> Iterator[Any]:  # also makes dict(self) and **self go through __getitem__
        return dict.__iter__(self)

    def get(self, key: Any, default: Any = None) -> Any:
        return _taken(dict.get(self, key, default))

    def pop(self, key: Any, *default: Any) -> Any:
        return _taken(dict.pop(self, key, *default))

    def items(self) -> Any:
        return ItemsView(self)

    def values(self) -> Any:
        return ValuesView(self)

    def copy(self) -> Any:
        return dict(self)


pytree.register_pytree_node(
    TracedDict,
    lambda traced: (list(dict.values(traced)), list(dict.keys(traced))),
    lambda values, keys: dict(zip(keys, values, strict=True)),
    serialized_type_name="torch_compat.TracedDict",
)


def _attributes(value: Any) -> list[Any]:
    found = getattr(value, "__dict__", None)
    return list(found.values()) if type(found) is dict else []


@functools.cache
def _watched_class(kind: type) -> type:
    """A subclass of ``kind`` whose attributes count as taken out when they are got."""
    return type(kind)(kind.__name__, (kind,), {"__getattribute__": _get_and_take, "__module__": kind.__module__})


def _get_and_take(self: Any, name: str) -> Any:
    return _taken(super(type(self), self).__getattribute__(name))


def plain(value: Any) -> Any:
    """The string or list itself."""
    if type(value) is TracedText:
        return str.__str__(value)
    if type(value) is TracedTexts:
        values = [list.__getitem__(value, index) for index in range(list.__len__(value))]
        return tuple(values) if value.kind is tuple else values
    return value


def path_of(value: Any) -> Path | None:
    """The path of a traced leaf in the batch; None for anything else."""
    if type(value) is TracedText:
        texts, path = value.__dict__["texts"], value.__dict__["path"]
    elif type(value) is TracedTexts:
        texts, path = value.texts, value.path
    else:
        return None
    texts.account(path)
    return path
