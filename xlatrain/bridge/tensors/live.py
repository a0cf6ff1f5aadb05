"""Live torch views of arrays that change under them.

While a model trains on a mesh, its ``nn.Parameter`` objects stay the same objects; only their class is changed for a time.
Every torch function that is given such a tensor first brings the current values to the host, and what user code may have
written there is found before the next step. Tensors that nobody reads cost nothing.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from xlatrain.bridge.tensors.host import borrowed, from_numpy
from xlatrain.bridge.tensors.host_copies import HostCopies, is_shown
from xlatrain.bridge.tensors.lazy import (
    AUTOGRAD_FIELDS,
    NEEDS_NO_VALUES,
    WithoutValues,
    lazy_tensor,
    memory_of,
    root_of,
    unread_lazy,
    with_values,
)
from xlatrain.bridge.tensors.strides import Geometry, Strides, strides_of, with_strides

_T: Any = torch.Tensor
_OF_AUTOGRAD = frozenset(
    [
        *(getattr(_T, name).__get__ for name in AUTOGRAD_FIELDS),
        _T.requires_grad.__set__, _T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook,
    ]
)  # fmt: skip
"""Of these, what a captured step's Python asks about or does to the traced value, which is the one in its autograd graph."""
_DETACHES = (_T.detach, torch.detach)
_TEXTS = (_T.__repr__, _T.__format__)
_NEVER = -1  # version of a tensor whose values have never been on the host
_GET_GRAD = _T.grad.__get__
_SET_GRAD = _T.grad.__set__


class LiveTensors:
    """The live tensors of one model: the source of their values, and which of them user code has seen.

    Args:
        read: name → the current value as a numpy array (a host copy or view; it is copied from).
        read_grad: name → the current gradient as a host tensor or None; raises where there is none to see.
        write_grad: takes what user code assigns to ``p.grad``.
        write: takes what user code wrote into a tensor whose host memory is given up.
        array: name → the array behind it.
    """

    def __init__(
        self,
        read: Callable[[str], np.ndarray],
        read_grad: Callable[[str], torch.Tensor | None],
        write_grad: Callable[[str, torch.Tensor | None], None],
        write: Callable[[str, np.ndarray], None] | None = None,
        array: Callable[[str], Any] | None = None,
    ) -> None:
        self.array = array
        self._copies = HostCopies(self._give_up)
        self._write = write
        self._read = read
        self.read_grad = read_grad
        self.write_grad = write_grad
        self._tensors: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self.exposed: set[str] = set()
        self._showing: dict[str, int] = {}  # how many of the tensors show the memory of one that has its own
        self.version = 0
        self.forms_changed = 0
        self._traced: Mapping[str, torch.Tensor] | None = None

    def adopt(self, tensors: Mapping[str, torch.Tensor], storageless: Collection[str] = ()) -> None:
        """Make ``tensors`` live, of this model alone; their current host values count as current.

        Those named in ``storageless`` have no host memory (:mod:`xlatrain.bridge.tensors.host_copies`). They get it when they are
        read, and lose it with the next step, or when another one needs it.
        """
        for name, tensor in tensors.items():
            disown(tensor)
            tensor.__class__ = _live_class(type(tensor))
            tensor._live = (self, name)  # pyright: ignore[reportAttributeAccessIssue]
            self._tensors[name] = tensor
            self._versions[name] = _NEVER if name in storageless else self.version
            if name in storageless:
                self._copies.add(name, tensor)
        with torch._C.DisableTorchFunctionSubclass():
            cpu = {name: one for name, one in tensors.items() if name not in storageless and one.device.type == "cpu"}
            of_each = Counter(one.untyped_storage()._cdata for one in cpu.values())
            self._showing.update((name, of_each[one.untyped_storage()._cdata]) for name, one in cpu.items())
        self.exposed |= self._shown(cpu)

    @property
    def storageless_bytes(self) -> int:
        """Bytes that all tensors without host memory of their own would take."""
        return self._copies.total_bytes

    def release(self, *, failed: bool = False) -> list[str]:
        """Bring every value to the host and give the tensors their own class back.

        Args:
            failed: a step failed, maybe with the arrays that had been donated to it: a tensor whose array is lost keeps what the
                host read last, NaN where it read nothing.

        Returns:
            The names of these.
        """
        self._copies.limited = False
        lost = []
        for name, tensor in list(self._tensors.items()):
            empty = self._copies.lacks(name)
            try:
                self.refresh(name)
            except RuntimeError:
                if not failed:
                    raise
                lost.append(name)
                if empty:
                    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                        tensor.data.fill_(math.nan if tensor.is_floating_point() else 0)
            del self._tensors[name]  # at once: where a later one fails, the run's end releases the rest
            tensor.__class__ = type(tensor).__bases__[1]
            del tensor._live  # pyright: ignore[reportAttributeAccessIssue]
        return lost

    def _forget(self, name: str, tensor: torch.Tensor) -> None:
        """Make the tensor an ordinary one: its values are no longer followed."""
        if self._tensors.get(name) is tensor:
            self._copies.remove(name)
            del self._tensors[name]
        tensor.__class__ = type(tensor).__bases__[1]
        del tensor._live  # pyright: ignore[reportAttributeAccessIssue]

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Put another tensor in the place of the tensor ``name``, which becomes an ordinary tensor; the new values count."""
        self.refresh(name)
        self._forget(name, self._tensors[name])
        self.exposed.discard(name)
        self.adopt({name: tensor})

    def put_unread(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor like the array of ``name`` that has no values yet in the place of the tensor that is there.

        That one becomes an ordinary tensor, with what was on the host last.
        """
        self._forget(name, self._tensors[name])
        self.exposed.discard(name)
        self.adopt({name: tensor})
        self._versions[name] = _NEVER

    def advance(self) -> None:
        """The arrays were replaced: what the host has is stale."""
        self.version += 1
        shown = self._shown(self.exposed) if self.exposed else ()
        self.exposed.clear()
        self._copies.drop_all()
        for name in shown:
            self.expose(name)

    def _shown(self, names: Collection[str]) -> set[str]:
        """Find those whose memory something else shows, too, a view or an array: what reads that cannot be seen."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = {name for name in names if is_shown(self._tensors[name], self._showing.get(name, 0))}
        return {name for name in shown if self.array is None or _is_read_alone(self.array(name))}

    def refresh(self, name: str) -> None:
        """Bring the current value of ``name`` to its tensor's host memory, if it is not there yet."""
        if self._versions[name] == self.version:
            return
        tensor = self._tensors[name]
        self._copies.make_room(name)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            tensor.data.copy_(from_numpy(self._read(name)).reshape(tensor.shape))
        self._versions[name] = self.version

    def leave(self, name: str) -> None:
        """Bring the current value of ``name`` to the host, to stay there: another tensor is about to take its place."""
        self.refresh(name)
        self.exposed.discard(name)

    def is_current(self, name: str) -> bool:
        """Whether the host has the current values of ``name``."""
        return self._versions[name] == self.version

    def is_shown(self, name: str) -> bool:
        """Whether something else shows the memory of ``name``: a view, an array."""
        return name in self.exposed and bool(self._shown([name]))

    def is_ordinary(self, name: str) -> bool:
        """Whether ``name`` is a tensor of no class of its own, with host memory."""
        return type(self._tensors[name]).__bases__[1] is torch.Tensor and not self._copies.lacks(name)

    def detached_later(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """``tensor.detach()`` of one without host memory: a tensor that shares it when it is read: ``state_dict()`` is free."""
        name = tensor._live[1]  # pyright: ignore[reportAttributeAccessIssue]
        if self._traced is not None or not self._copies.lacks(name):
            return None
        fetch = _DetachedLater(self, name, tensor, self.version)
        return lazy_tensor(tuple(tensor.shape), tensor.dtype, fetch, strides_of(tensor))

    def lay_out(self, name: str, strides: Strides | None) -> None:
        """Give a tensor other strides, with its current value."""
        self.refresh(name)
        tensor = self._tensors[name]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            tensor.data = tensor.data.contiguous() if strides is None else with_strides(tensor.data, strides)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of a name."""
        return self._tensors[name]

    def shown_by(self, tensors: Sequence[torch.Tensor]) -> list[str | None]:
        """For each of some ordinary or lazy tensors the name of the tensor whose memory it has."""
        shown = {memory_of(self._tensors[name])[0]: name for name in self.exposed}  # where others show it, it is
        roots = map(root_of, tensors)
        return [one._live[1] if isinstance(one, _Live) else shown.get(memory_of(one)[0]) for one in roots]

    def expose(self, name: str) -> None:
        """User code is about to see (and may write) the values of ``name``."""
        self.refresh(name)
        self.exposed.add(name)

    def written(self) -> dict[str, np.ndarray]:
        """The host values, by name, of tensors that user code changed since the last :meth:`advance`."""
        if not self.exposed:
            return {}
        found = ((name, self._changed(name)) for name in sorted(self.exposed))
        return {name: host for name, host in found if host is not None}

    def _changed(self, name: str) -> np.ndarray | None:
        """The host values of an exposed tensor, if they are not those of its array."""
        with torch._C.DisableTorchFunctionSubclass():
            host = borrowed(self._tensors[name].data)
        current = self._read(name)
        same = np.array_equal(host.astype(current.dtype), current, equal_nan=host.dtype.kind == "f")
        return None if same else host

    def _give_up(self, name: str) -> None:
        """The host memory of ``name`` is about to go: what user code wrote there counts."""
        if name in self.exposed and self._write is not None and (host := self._changed(name)) is not None:
            self._write(name, np.array(host))
        self.exposed.discard(name)
        self._versions[name] = _NEVER

    @contextlib.contextmanager
    def traced_as(self, traced: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Within the block, a live tensor that the Python of a captured step reaches by any way stands for its traced value."""
        self._traced = traced
        try:
            yield
        finally:
            self._traced = None

    def stand_in(self, tensor: Any) -> torch.Tensor:
        """``tensor`` itself, refreshed, or its traced value while a step is captured."""
        name = tensor._live[1]
        if self._traced is not None and name in self._traced:
            return self._traced[name]
        self.expose(name)
        return tensor


def _is_read_alone(array: Any) -> bool:
    """Whether a process reads the array without the others."""
    return array.is_fully_addressable or array.is_fully_replicated


class _Live(WithoutValues):
    """The class of a live tensor; see :class:`LiveTensors`."""

    _live: tuple[LiveTensors, str]

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_GET_GRAD, _SET_GRAD):
            owner, name = args[0]._live
            if owner._traced is None:
                return owner.read_grad(name) if func == _GET_GRAD else owner.write_grad(name, args[1])
        if func in _DETACHES and (later := args[0]._live[0].detached_later(args[0])) is not None:
            return later
        if func in _TEXTS:
            return args[0]._text(func.__name__, *args[1:], **kwargs)
        if func in NEEDS_NO_VALUES and not (func in _OF_AUTOGRAD and args[0]._live[0]._traced is not None):
            if func == _T.requires_grad.__set__ or func is _T.requires_grad_:
                args[0]._live[0].forms_changed += 1
        else:
            given, args, kwargs = args, *with_values(args, kwargs)
            attribute = getattr(func, "__self__", None)
            if type(attribute) is types.GetSetDescriptorType and args[0] is not given[0]:
                return _attribute_of(args[0], attribute.__name__, *args[1:] if func.__name__ == "__set__" else ())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _with_values(self) -> torch.Tensor:
        return self._live[0].stand_in(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self._plain_copy()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain_copy().__reduce_ex__(protocol)

    def _text(self: Any, asked: str, *args: Any, **kwargs: Any) -> str:
        """The text that ``repr`` or ``format`` gives of an ordinary tensor; torch names other classes in it."""
        owner, name = self._live
        if asked == "__format__" and (self.ndim > 0 or type(self).__bases__[1] is not torch.Tensor):
            return object.__format__(self, *args)
        if owner._traced is not None and name in owner._traced:
            return str(owner._traced[name]) if asked == "__repr__" else format(owner._traced[name], *args)
        return getattr(_T, asked)(self._plain_copy(), *args, **kwargs)

    def _plain_copy(self) -> torch.Tensor:
        """An ordinary tensor or parameter with the current values."""
        owner, name = self._live
        owner.refresh(name)
        kind = type(self).__bases__[1]
        with torch._C.DisableTorchFunctionSubclass():
            values = self.detach().clone()  # pyright: ignore[reportAttributeAccessIssue]
            if kind is torch.Tensor:
                return values
            return kind(values, requires_grad=self.requires_grad)  # pyright: ignore[reportAttributeAccessIssue]


def _attribute_of(traced: torch.Tensor, name: str, *value: Any) -> Any:
    """An attribute of what stands for a live tensor, or its assignment: its class may have its own (``data``, ``grad``)."""
    with torch._C.DisableTorchFunctionSubclass():
        return setattr(traced, name, *value) if value else getattr(traced, name)


def is_live(tensor: Any) -> bool:
    """Whether a tensor is one of a model on a mesh."""
    return isinstance(tensor, _Live)


def live_array(tensor: torch.Tensor) -> Any:
    """The array behind a live tensor or one detached from it; None for others, and where user code may have written."""
    if isinstance(fetch := unread_lazy(tensor), _DetachedLater):
        owner, name = fetch.owner, fetch.name
    elif isinstance(tensor, _Live):
        owner, name = tensor._live
    else:
        return None
    return None if owner.array is None or name in owner.exposed else owner.array(name)


@dataclass(frozen=True)
class _DetachedLater:
    """The function that gives a live tensor without host memory its values after it was detached.

    Raises:
        RuntimeError: a step has replaced the values since then.
    """

    owner: LiveTensors
    name: str
    of: torch.Tensor
    version: int
    geometry: Geometry | None = None

    def __call__(self) -> torch.Tensor:
        if self.owner.version != self.version:
            raise RuntimeError(
                f"{self.name!r} was detached (or taken by state_dict()) before the last step and is read after it: the values "
                "that it had are gone. Keep a copy, .detach().clone(), or detach it again to see today's values"
            )
        if isinstance(self.of, _Live):
            self.owner.expose(self.name)
        with torch._C.DisableTorchFunctionSubclass():
            return self.of.data


def disown(tensor: torch.Tensor) -> bool:
    """Make a tensor that an earlier model left on its mesh an ordinary one, without host memory; False for any other tensor."""
    if not isinstance(tensor, _Live):
        return False
    owner, name = tensor._live
    owner._forget(name, tensor)
    return True


_CLASSES: dict[type, type] = {}


def _live_class(kind: type) -> type:
    """The live subclass of a tensor class; its bases are _Live and the class itself."""
    if kind not in _CLASSES:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}  # user code prints them, and looks at them
        _CLASSES[kind] = type(kind)(kind.__name__, (_Live, kind), names)
    return _CLASSES[kind]
