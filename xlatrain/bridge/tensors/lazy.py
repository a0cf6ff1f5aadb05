"""Host tensors whose values are fetched when something first needs them."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from xlatrain.bridge.capturing import is_capturing
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.tensors.host_copies import storageless
from xlatrain.bridge.tensors.strides import Geometry, Strides, dense_strides, geometry_of, strides_of, with_strides

_T: Any = torch.Tensor
AUTOGRAD_FIELDS = ("requires_grad", "is_leaf", "grad_fn", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
NEEDS_NO_VALUES = frozenset(
    [
        *(getattr(_T, name).__get__ for name in (
            *AUTOGRAD_FIELDS, "shape", "dtype", "device", "ndim", "layout", "is_sparse", "is_quantized",
            "is_meta", "is_cpu", "is_cuda", "is_mkldnn", "is_nested", "is_xla", "is_mps", "_base",
            "output_nr", "name", "itemsize", "nbytes", "is_sparse_csr",
        ) if hasattr(_T, name)),
        _T.requires_grad.__set__,
        _T.requires_grad_, _T.size, _T.dim, _T.numel, _T.nelement, _T.stride, _T.element_size, _T.is_floating_point,
        _T.is_complex, _T.is_contiguous, _T.__hash__, _T.__len__, _T.ndimension, _T.get_device, _T.is_signed, _T.type,
        _T.register_hook, torch.is_floating_point, torch.is_complex, torch.numel, _T.register_post_accumulate_grad_hook,
    ]
)  # fmt: skip


class WithoutValues:
    """A host tensor that may not have its values."""

    __slots__ = ()

    def _with_values(self) -> torch.Tensor:
        """The tensor that has them. Torch asks one of the classes in a call only, so each sees to both."""
        raise NotImplementedError


_HOLD_NO_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device])


def with_values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a torch function, with the live and lazy tensors in them as they are with their values."""
    return tuple(map(_given, args)), {name: _given(value) for name, value in kwargs.items()}


def _given(value: Any) -> Any:
    if isinstance(value, WithoutValues):  # most are no trees, and a tree takes longer than the function
        return value._with_values()
    if type(value) in _HOLD_NO_TENSORS:
        return value
    return pytree.tree_map_only(WithoutValues, lambda tensor: tensor._with_values(), value)


class LazyTensor(WithoutValues, torch.Tensor):
    """A host tensor whose values are fetched when something first needs them; from then on it is an ordinary tensor."""

    _fetch: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _T.to and _changes_nothing(args, kwargs):  # torch's optimizers do that to a loaded state
            return args[0]
        if func not in NEEDS_NO_VALUES:
            args, kwargs = with_values(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _with_values(self) -> torch.Tensor:
        """Fetch the values, and become an ordinary tensor of the same shape and dtype.

        Raises:
            CaptureError: a captured step asks for them.
        """
        if type(self) is not LazyTensor:  # fetched while an earlier argument was
            return self
        if is_capturing():
            error = CaptureError(
                f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: the step computes with a tensor "
                "that an earlier step stored, and its value is no part of the compiled step's state.\n  Fix: keep it in a buffer "
                "(self.register_buffer(...), then self.name.copy_(...) or self.name = ... in the step)."
            )
            error.stored = self
            raise error
        fetched = self._fetch()
        with torch._C.DisableTorchFunctionSubclass():
            strides = strides_of(self)
            given = fetched.reshape(self.shape)
            self.data = given if strides is None or given.stride() == strides else with_strides(given, strides)
        del self._fetch
        self.__class__ = torch.Tensor  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.detach().clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)


LazyTensor.__name__ = LazyTensor.__qualname__ = torch.Tensor.__name__
LazyTensor.__module__ = torch.Tensor.__module__


def _changes_nothing(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether ``tensor.to(dtype=…, device=…)`` gives the tensor itself."""
    tensor = args[0]
    same = {"dtype": tensor.dtype, "device": tensor.device}
    return len(args) == 1 and all(key in same and same[key] == value for key, value in kwargs.items())


def _has_values_given(kind: Any) -> None:
    """Let calls of TorchScript's, which ask no class, have live and lazy tensors with their values."""
    call = kind.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_values(args, kwargs)
        return call(self, *args, **kwargs)

    kind.__call__ = called


_has_values_given(torch.jit.ScriptFunction)
_has_values_given(torch._C.ScriptMethod)


def unread_lazy(tensor: Any) -> Callable[[], torch.Tensor] | None:
    """The function that a lazy tensor would call for its values, if nobody has needed them yet; None for any other tensor."""
    return tensor._fetch if type(tensor) is LazyTensor else None


def become_lazy(tensor: torch.Tensor, fetch: Callable[[], torch.Tensor]) -> None:
    """Make an ordinary tensor, whose memory nothing else shows, one that calls ``fetch`` for its values."""
    tensor.__class__ = LazyTensor
    tensor._fetch = fetch  # pyright: ignore[reportAttributeAccessIssue]


def fetch_from(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a lazy tensor, which nobody has read yet, the values of another such."""
    tensor._fetch = other._fetch  # pyright: ignore[reportAttributeAccessIssue]


def fetch_nothing(tensor: torch.Tensor) -> None:
    """Make a lazy tensor, which :func:`become_lazy` made and nobody has read, the ordinary one that it was."""
    del tensor._fetch  # pyright: ignore[reportAttributeAccessIssue]
    tensor.__class__ = torch.Tensor


def read_lazy(tensor: torch.Tensor) -> None:
    """Make a lazy tensor an ordinary one now; any other stays as it is."""
    if type(tensor) is LazyTensor:
        tensor._with_values()


def lazy_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, fetch: Callable[[], torch.Tensor], strides: Strides | None = None
) -> torch.Tensor:
    """A tensor of ``shape`` and ``dtype`` that calls ``fetch`` for its values when they are first needed.

    Args:
        strides: None: contiguous.
    """
    tensor = torch.Tensor._make_subclass(LazyTensor, _placeholder(shape, dtype, strides))
    tensor._fetch = fetch
    return tensor


@functools.lru_cache(maxsize=256)
def _placeholder(shape: tuple[int, ...], dtype: torch.dtype, strides: Strides | None) -> torch.Tensor:
    """A tensor of this geometry whose memory all lazy ones share, which have none."""
    return storageless(shape, strides or dense_strides(shape, (0,) * len(shape)), dtype)


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which one is a view as long as nobody has read it."""
    while (of := getattr(unread_lazy(tensor), "of", None)) is not None:
        tensor = of
    return tensor


def memory_of(tensor: torch.Tensor) -> tuple[Hashable, Geometry]:
    """A key that tensors of one memory have in common, and the geometry of this one there; asks for no values."""
    fetch: Any = unread_lazy(tensor)
    if (of := getattr(fetch, "of", None)) is not None:
        key, geometry = memory_of(of)
        return key, geometry if fetch.geometry is None else (*fetch.geometry[:2], geometry[2] + fetch.geometry[2])
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()._cdata if fetch is None else ("unread", id(tensor)), geometry_of(tensor)
