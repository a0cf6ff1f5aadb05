"""A user's batch as a flat list of tensors, and back.

A batch may be nested in any way: dicts, lists, tuples, namedtuples, dataclasses, ``transformers.BatchEncoding``,
``PackedSequence``, or an object of the user's own that keeps tensors in its attributes. What is not a tensor (strings, ids,
numbers, numpy arrays) is carried along. Two batches have equal specs when their *tensors* sit in the same places: what else
they carry never makes a difference, so it never causes a recompilation.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from xlatrain.bridge.capture.endowed import endowed
from xlatrain.bridge.errors import CaptureError
from xlatrain.cluster.distributed import world

Rebuild = Callable[[Iterator[torch.Tensor]], Any]

_TENSOR = "tensor"
"""The key of a tensor; that of one of a class of the user's is a :class:`TensorClass`."""
_OTHER = "other"
# Classes whose attributes are never searched for tensors: they are no part of a batch, and may be large.
_OPAQUE = (torch.nn.Module, torch.Generator, torch.dtype, torch.device, np.ndarray, np.generic, type, types.ModuleType)
_OPAQUE += (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_READABLE = (str, list, tuple, dict, np.ndarray, np.generic)  # attributes of a batch object whose values a step's Python may read
_MAKERS = frozenset(("torch", "xlatrain", "torch_compat"))  # their classes of tensors are no more to a step than a tensor
_LIKE_PLAIN = frozenset(("monai.data.meta_tensor.MetaTensor",))  # torch's functions compute of it what they do of a plain one
_ATOMS = frozenset({str, bytes, bytearray, int, float, bool, complex, type(None), range, slice})


class BatchSpec:
    """The structure of a batch: the places of its tensors, and all of its other leaves.

    Equality and hash are those of the tensors' places (``key``); shapes, dtypes and the other leaves don't count.

    Attributes:
        key: hashable description of the containers that hold tensors.
        others: the leaves that are not tensors, in order.
    """

    __slots__ = ("_rebuild", "key", "others")

    def __init__(self, key: Any, rebuild: Rebuild, others: list[Any]) -> None:
        self.key = key
        self.others = others
        self._rebuild = rebuild

    def unflatten(self, leaves: Sequence[Any], other: Callable[[Any, int], Any] | None = None) -> Any:
        """The batch with other leaves in the tensors' places, in the order of :func:`flatten_batch`.

        Containers are new; the original batch is not changed.

        Args:
            leaves: for the tensors.
            other: gives what takes the place of a leaf that is no tensor, given it and its index among :attr:`others`.
        """
        return self._rebuild(_Leaves(leaves, other) if other is not None and self.others else iter(leaves))

    def put_back(self) -> None:
        """Take back what ``unflatten`` has put into the user's objects, where it is as it was: of a batch, nothing."""

    def names(self) -> list[str]:
        """The names by which a user would reach each leaf: ``batch["input_ids"]``, ``batch[0].x``."""
        return list(_names(self.key, "batch"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchSpec) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"BatchSpec({', '.join(self.names())})"


def flatten_batch(batch: Any) -> tuple[list[torch.Tensor], BatchSpec]:
    """The tensors of ``batch``, depth first in the order of insertion, and the spec that puts them back.

    Args:
        batch: anything that a loader may yield.

    Returns:
        the tensors themselves (no copies), and their :class:`BatchSpec`.
    """
    kind = type(batch)
    if kind is tuple or kind is list:
        for leaf in batch:
            if type(leaf) is not torch.Tensor:
                break
        else:
            return list(batch), _sequence_spec(kind, len(batch))
    elif kind is dict:
        for leaf in batch.values():
            if type(leaf) is not torch.Tensor:
                break
        else:
            return list(batch.values()), _dict_spec(tuple(batch))
    leaves: list[torch.Tensor] = []
    others: list[Any] = []
    key, rebuild = _flatten(batch, leaves, others, ())
    return leaves, BatchSpec(key, rebuild, others)


def map_tensors(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """``batch`` with ``function`` applied to each of its tensors."""
    leaves, spec = flatten_batch(batch)
    return spec.unflatten([function(leaf) for leaf in leaves])


def first_batch_size(leaves: Sequence[torch.Tensor]) -> int | None:
    """Dim 0 of the first leaf that has dims; None if there is none."""
    for leaf in leaves:
        if leaf.ndim:
            return leaf.shape[0]
    return None


class LoggedSize(NamedTuple):
    """The weight in an epoch's mean of values logged with a batch, as Lightning finds it.

    Attributes:
        rows: dim 0 of the batch's first tensor, 1 for a 0-d tensor and where there is none.
        is_ambiguous: whether other leaves say otherwise.
        is_hidden: whether all tensors are in objects of which Lightning does not know that they hold some.
    """

    rows: int
    is_ambiguous: bool = False
    is_hidden: bool = False

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], spec: BatchSpec) -> LoggedSize:
        """The weight for a batch of this structure, whose tensors have these (global) shapes."""
        sizes = [shape[0] if shape else 1 for shape in shapes] or [1]
        ambiguous = bool(spec.others) or any(size != sizes[0] for size in sizes)
        return cls(sizes[0], ambiguous, bool(shapes) and not _is_shown(spec.key))


@functools.lru_cache(maxsize=256)
def _is_shown(key: Any) -> bool:
    """Whether a tensor is in a container: something to iterate over, a dataclass; not in an object of another class alone."""
    if not isinstance(key, tuple):
        return key != _OTHER
    kind, children = key
    return (issubclass(kind, Iterable) or dataclasses.is_dataclass(kind)) and any(_is_shown(child) for _, child in children)


def take_rows(batch: Any, count: int) -> Any:
    """The first ``count`` rows of ``batch``: of each leaf whose dim 0 is the batch size."""
    leaves, spec = flatten_batch(batch)
    size = first_batch_size(leaves)
    return spec.unflatten([leaf[:count] if leaf.ndim and leaf.shape[0] == size else leaf for leaf in leaves])


# ------------------------------------------------------------------------------------------------------------ flattening


@functools.cache
def _sequence_spec(kind: type, n: int) -> BatchSpec:
    """The spec of a plain tuple or list of ``n`` tensors: the commonest batch, so made once."""
    if n == 0:
        return BatchSpec(_OTHER, lambda _: kind(), [kind()])
    return BatchSpec((kind, tuple((i, _TENSOR) for i in range(n))), kind, [])


@functools.lru_cache(maxsize=128)
def _dict_spec(names: tuple[Any, ...]) -> BatchSpec:
    """The spec of a plain dict of tensors only."""
    if not names:
        return BatchSpec(_OTHER, lambda _: {}, [{}])
    return BatchSpec((dict, tuple((name, _TENSOR) for name in names)), lambda leaves: dict(zip(names, leaves, strict=True)), [])


def _flatten(value: Any, leaves: list[torch.Tensor], others: list[Any], parents: tuple[int, ...]) -> tuple[Any, Rebuild]:
    """Key and rebuild function of ``value``; appends its leaves."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        key = _TENSOR if type(value) is torch.Tensor or is_like_plain(type(value)) else TensorClass.of(value)
        return key, next if key == _TENSOR else functools.partial(_next_of, key)
    children = None if id(value) in parents else _children(value)
    if children is not None:
        n_leaves, n_others = len(leaves), len(others)
        parents = (*parents, id(value))
        flat = [(name, *_flatten(child, leaves, others, parents)) for name, child in children]
        if len(leaves) > n_leaves:
            rebuilds = [(name, rebuild) for name, _, rebuild in flat]
            if not isinstance(value, (Mapping, Sequence)):  # an object may keep anything else besides
                rebuilds = [
                    (name, rebuild)
                    for (name, key, rebuild), (_, child) in zip(flat, children, strict=True)
                    if key != _OTHER or isinstance(child, _READABLE)
                ]
                flat = [entry for entry in flat if entry[1] != _OTHER]
            key = (type(value), tuple((name, child_key) for name, child_key, _ in flat))
            return key, _rebuilder(value, rebuilds)
        del others[n_others:]  # without a tensor the whole subtree is one leaf, whatever its structure
    others.append(value)
    index = len(others) - 1
    return _OTHER, lambda leaves: leaves.other(value, index) if isinstance(leaves, _Leaves) else value


@functools.cache
def is_like_plain(kind: type) -> bool:
    """Whether tensors of a class are to a step what those of torch's own are."""
    return kind.__module__.partition(".")[0] in _MAKERS or f"{kind.__module__}.{kind.__qualname__}" in _LIKE_PLAIN


@dataclasses.dataclass(frozen=True)
class TensorClass:
    """The key of a tensor of a class of the user's own, with the attributes that a step may read.

    Attributes:
        kind: the class.
        attributes: name → value; None where one may change, or has no value that can be compared.
        text: of them.
    """

    kind: type
    attributes: tuple[tuple[str, Any], ...] | None
    text: str  # True and 1 are equal

    def __repr__(self) -> str:  # of attributes each process has its own
        return repr(self.kind)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorClass:
        """The key of a tensor."""
        held = tuple(vars(tensor).items())
        fixed = all(_is_fixed(value) for _, value in held)
        return cls(type(tensor), held if fixed else None, repr(held) if fixed else "")


def _is_fixed(value: Any) -> bool:
    """Whether a value stays as it is, and is equal to no other that a step could tell from it."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return type(value) in (str, bytes, int, bool, type(None)) or isinstance(value, enum.Enum | type)


def _next_of(of: TensorClass, leaves: Iterator[torch.Tensor]) -> torch.Tensor:
    leaf = next(leaves)
    if not isinstance(leaf, FakeTensor | FunctionalTensor):
        return leaf
    others = bool(of.attributes) and world().process_count > 1  # whose attributes may be others
    if of.attributes is None or others or isinstance(leaf, FunctionalTensor):  # which cannot be recorded
        raise CaptureError(
            f"the batch holds a {of.kind.__module__}.{of.kind.__qualname__}, and the step cannot be recorded, or it has "
            "attributes that may change or differ in another process. Fix: make it an ordinary tensor in "
            "on_before_batch_transfer: x.as_subclass(torch.Tensor)"
        )
    return endowed(leaf, of.kind, dict(of.attributes))


class _Leaves:
    """An iterator over tensors that also knows what to put in place of the other leaves."""

    def __init__(self, tensors: Sequence[Any], other: Callable[[Any, int], Any]) -> None:
        self._tensors = iter(tensors)
        self.other = other

    def __iter__(self) -> _Leaves:
        return self

    def __next__(self) -> Any:
        return next(self._tensors)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """(name, child) of a container; None for a leaf."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, _OPAQUE):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if hasattr(value, field.name)]
    attributes = getattr(value, "__dict__", None)
    return list(attributes.items()) if attributes else None


def _rebuilder(value: Any, flat: list[tuple[Any, Rebuild]]) -> Rebuild:
    kind = type(value)
    rebuilds = [rebuild for _, rebuild in flat]
    if kind is tuple or kind is list:
        return lambda leaves: kind([rebuild(leaves) for rebuild in rebuilds])
    if kind is dict:
        return lambda leaves: {name: rebuild(leaves) for name, rebuild in flat}
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):  # a namedtuple takes its fields one by one
            return lambda leaves: kind(*[rebuild(leaves) for rebuild in rebuilds])
        return lambda leaves: kind([rebuild(leaves) for rebuild in rebuilds])
    if isinstance(value, (Mapping, list)):
        return lambda leaves: _copy_with_items(value, [(name, rebuild(leaves)) for name, rebuild in flat])
    return lambda leaves: _copy_with_attributes(value, [(name, rebuild(leaves)) for name, rebuild in flat])


def _copy_with_items(value: Any, items: list[tuple[Any, Any]]) -> Any:
    """A shallow copy keeps what a subclass has besides its items (a default factory, ``BatchEncoding.encodings``)."""
    try:
        new = copy.copy(value)
        for name, item in items:
            new[name] = item
    except TypeError as error:
        raise TypeError(
            f"a batch holds tensors in a {type(value).__name__}, which cannot be copied and changed ({error}); "
            "use a dict, a list, or a dataclass"
        ) from error
    return new


def _copy_with_attributes(value: Any, items: list[tuple[str, Any]]) -> Any:
    new = copy.copy(value)
    for name, item in items:
        object.__setattr__(new, name, item)  # a frozen dataclass refuses setattr
    return new


def _names(key: Any, prefix: str) -> Iterator[str]:
    if not isinstance(key, tuple):
        if key != _OTHER:
            yield prefix
    else:
        kind, children = key
        indexed = issubclass(kind, (Mapping, list)) or (issubclass(kind, tuple) and not hasattr(kind, "_fields"))
        fields = getattr(kind, "_fields", None)
        for name, child in children:
            if indexed:
                quoted = f'"{name}"' if isinstance(name, str) else repr(name)
                yield from _names(child, f"{prefix}[{quoted}]")
            else:
                yield from _names(child, f"{prefix}.{fields[name] if fields else name}")
