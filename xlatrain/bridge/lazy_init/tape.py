"""The tape: which ATen ops made the values of which storages, in order."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree

from xlatrain.bridge.lazy_init.trunc_normal import TRUNC_NORMAL
from xlatrain.bridge.tensors.lazy import unread_lazy
from xlatrain.bridge.tensors.live import is_live

aten = torch.ops.aten
TORCHS_NUMBERS = 1 << 30
"""Bytes of random numbers up to which those of a block are torch's own; where there are more, all are drawn on the shards."""

# Ops that give every element of their first argument a new value that does not depend on the old one.
_OVERWRITING = frozenset({
    aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default,
    aten.bernoulli_.float, aten.exponential_.default, aten.random_.default, getattr(aten.random_, "from"), aten.random_.to,
    aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default, TRUNC_NORMAL,
})  # fmt: skip


class Geometry(NamedTuple):
    """The geometry with which a tensor views its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Geometry:
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())


class View(NamedTuple):
    """The derivation of a geometry from another one of the same storage: the ``output``-th tensor of ``func(parent, *args)``."""

    parent: Geometry
    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int


@dataclass(eq=False)
class Storage:
    """A storage without memory.

    It is kept alive by the tensors that have it and by the ops that read it, and keeps the ops that wrote it: what nobody can ask
    for any more is forgotten by itself.

    Attributes:
        handle: keeps the identity of the storage from being given to another one.
        root: the geometry of the tensor that it was made as.
        nbytes: what it would take.
        tape: of the block in which it was made.
        writes: the nodes that made or changed it, in order.
        views: how other geometries are derived from the root.
        holders: the tensors that have it, once its block has ended.
    """

    handle: torch.UntypedStorage
    root: Geometry
    nbytes: int
    tape: Tape
    writes: list[Node] = field(default_factory=list)
    views: dict[Geometry, View] = field(default_factory=dict)
    holders: list[weakref.ref[torch.Tensor]] = field(default_factory=list)


class Operand(NamedTuple):
    """A tensor without values among the arguments of an op."""

    storage: Storage
    geometry: Geometry


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor with values among the arguments of an op, by reference.

    Attributes:
        tensor: the values; or a lazy tensor, which is read when it is needed.
        version: torch's count of in-place changes at the time.
    """

    tensor: torch.Tensor
    version: int

    def unread(self) -> torch.Tensor:
        """The tensor, which may be lazy.

        Raises:
            RuntimeError: its values were changed since the op was recorded.
        """
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that a parameter is computed from was changed in place after the "
                "constructor used it; give the constructor a copy (tensor.clone())"
            )
        return self.tensor

    def read(self) -> torch.Tensor:
        """The values, detached; what is read of a lazy tensor is not kept."""
        return with_values(self.unread())


def with_values(tensor: torch.Tensor) -> torch.Tensor:
    """An ordinary tensor with the values of one that may be lazy, detached."""
    # Asked for outright: where torch functions of subclasses are disabled, a lazy tensor would show its placeholder.
    fetch = unread_lazy(tensor)
    return tensor.detach() if fetch is None else fetch().reshape(tensor.shape).detach()


@dataclass(eq=False)
class Draw:
    """A random op on the tape.

    Attributes:
        number: which draw of the block it is.
        state: of torch's generator, which decides the values; None: the seed and the name do.
        is_seen: whether somebody has its values already, which it keeps.
        seed: of the block.
        name: The path of the parameter that it ends up in, where that is known when the block ends; else by its number.
    """

    number: int
    state: torch.Tensor | None = None
    is_seen: bool = False
    seed: int = 0
    name: str | None = None

    def key(self) -> np.ndarray:
        """uint32[2], the raw PRNG key."""
        if self.name is None:
            self.name = f"draw {self.number}"
        digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        return np.frombuffer(digest[:8], np.uint32)


class SeededStream:
    """A stream of names for the draws since the last explicit ``torch.manual_seed``; does nothing before the first."""

    def __init__(self) -> None:
        self.seed: str | None = None
        self.count = 0

    def name(self, draw: Draw) -> None:
        if self.seed is not None:
            draw.seed, draw.name = 0, f"seed {self.seed} draw {self.count}"
            self.count += 1


@dataclass(eq=False)
class Node:
    """A recorded op.

    Attributes:
        index: orders the nodes of all tapes.
        func: the op.
        args, kwargs: of the op, with :class:`Operand` and :class:`Constant` in place of tensors.
        outputs: for each tensor of the flattened result: the new storage that it made, or None.
        reads: storages that the op reads.
        draw: of a random op.
        overwrites: the storage of which nothing older is needed after this op, or None.
    """

    index: int
    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Storage | None, ...] = ()
    reads: tuple[Storage, ...] = ()
    draw: Draw | None = None
    overwrites: Storage | None = None


_STORAGES: weakref.WeakValueDictionary[int, Storage] = weakref.WeakValueDictionary()
_ORDER = itertools.count()


def operand_of(tensor: torch.Tensor) -> Operand | None:
    """The record of ``tensor`` as an operand; None for a tensor with values."""
    with torch._C.DisableTorchFunctionSubclass():  # looking must not give it values
        if is_live(tensor):  # it has its values on a mesh, though the record of its storage may not have been let go of yet
            return None
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_nested:
            return None
        try:
            storage = _STORAGES.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a wrapper subclass has no storage
            return None
        return None if storage is None else Operand(storage, Geometry.from_tensor(tensor))


def forget(storage: Storage) -> None:
    """The tensors of ``storage`` have values of their own from now on."""
    _STORAGES.pop(storage.handle._cdata, None)


class Tape:
    """The ops that one block records.

    Args:
        seed: decides, with the names of the draws, random values that are not torch's; or a function that gives it.
        torchs_numbers: bytes of random numbers up to which they are torch's.

    Attributes:
        stream: explicit seeds inside the block.
        draws: how many random ops there were.
        kept: the storages made, for as long as the block lasts.
    """

    def __init__(self, seed: int | Callable[[], int], torchs_numbers: int = TORCHS_NUMBERS) -> None:
        self._seed = seed
        self._left = torchs_numbers
        self._torchs: list[Draw] = []
        self.stream = SeededStream()
        self.draws = 0
        self.kept: list[Storage] = []

    @cached_property
    def seed(self) -> int:
        """The seed; asked for when the first random op is recorded whose numbers are not torch's."""
        return self._seed() if callable(self._seed) else self._seed

    def is_torchs(self, nbytes: int) -> bool:
        """Whether so many bytes that are drawn next are torch's numbers."""
        return nbytes <= self._left

    def draw(self, nbytes: int, at_once: Callable[[], object]) -> Draw:
        """The next random op.

        Args:
            nbytes: of its numbers.
            at_once: draws them. Where they are torch's, its generator is afterwards where it would be without the tape.
        """
        draw = Draw(self.draws)
        self.draws += 1
        had, self._left = self._left, self._left - nbytes  # below zero for good
        self.stream.name(draw)
        self._torchs.append(draw)
        if self._left >= 0:
            draw.state = torch.default_generator.get_state()
            at_once()
        else:
            self._draw_otherwise()
            if had >= 0:
                torch.empty(1).uniform_()  # torch's generator moves on: the next block has another seed
        return draw

    def _draw_otherwise(self) -> None:
        """Let seed and names decide what nobody has seen yet."""
        for draw in self._torchs:
            if not draw.is_seen:
                draw.state = None
                draw.seed = draw.seed if draw.name is not None else self.seed
        self._torchs.clear()

    def end(self) -> None:
        """The block has ended: its random numbers stay what they are."""
        self._torchs.clear()
        self.kept.clear()

    def adopt(self, tensor: torch.Tensor) -> Storage:
        """Take up a storageless tensor as a new storage."""
        handle = tensor.untyped_storage()
        storage = Storage(handle, Geometry.from_tensor(tensor), handle.nbytes(), self)
        _STORAGES[handle._cdata] = storage
        self.kept.append(storage)
        return storage

    def derive(self, source: Operand, view: torch.Tensor, func: Any, args: Any, kwargs: Any, output: int) -> None:
        """Remember that ``view`` is ``func`` of ``source``."""
        geometry = Geometry.from_tensor(view)
        storage = source.storage
        if source.geometry != storage.root and source.geometry not in storage.views:  # the tensor was made by set_()
            strided = (source.geometry.size, source.geometry.stride, source.geometry.offset)
            storage.views[source.geometry] = View(storage.root, aten.as_strided.default, strided, {}, 0)
        if geometry != storage.root and geometry not in storage.views and geometry != source.geometry:
            storage.views[geometry] = View(source.geometry, func, args, kwargs, output)

    def record(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        written: list[Operand],
        made: tuple[torch.Tensor | None, ...] = (),
        draw: Draw | None = None,
    ) -> Node:
        """Append an op.

        Args:
            func: the op.
            args, kwargs: with :class:`Operand` and :class:`Constant` in place of tensors.
            written: what it changes in place.
            made: for each tensor of its result the new storageless tensor that stands for it.
            draw: of a random op.
        """
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_place)
        operands = [leaf for leaf in leaves if isinstance(leaf, Operand)]
        reads = tuple({operand.storage: None for operand in operands})
        outputs = tuple(None if tensor is None else self.adopt(tensor) for tensor in made)
        node = Node(next(_ORDER), func, args, kwargs, outputs, reads, draw)
        # A layer that loads its own state_dict copies a tensor to itself: then what it had before is needed.
        itself = written and sum(operand.storage is written[0].storage for operand in operands) > 1
        if func in _OVERWRITING and written and not itself and _covers(written[0]):
            node.overwrites = written[0].storage
        for storage in {*(operand.storage for operand in written), *(made for made in outputs if made is not None)}:
            storage.writes.append(node)
        return node


def is_place(leaf: Any) -> bool:
    """True for an operand or constant, which stands for a tensor among recorded arguments."""
    return isinstance(leaf, Operand | Constant)


def _covers(operand: Operand) -> bool:
    """Whether the tensor has every element of its storage, each once."""
    geometry = operand.geometry
    if geometry.offset or 0 in geometry.size:
        return False
    elements = 1
    for length, stride in sorted(zip(geometry.size, geometry.stride, strict=True), key=lambda dim: dim[1]):
        if length == 1:
            continue
        if stride != elements:
            return False
        elements *= length
    return elements * geometry.dtype.itemsize == operand.storage.nbytes
