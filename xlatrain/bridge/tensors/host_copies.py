"""Host memory for whole copies of sharded tensors: a few at a time, of tensors that have none of their own.

A storageless tensor is a real ``torch.Tensor`` (or ``nn.Parameter``) on the CPU with shape, strides and a storage of the right
size whose address is null. Views of it, ``.data``, weak references and ``isinstance`` checks work as on any tensor, and it keeps
its identity when it gets memory later (``tensor.data = values``). Kernels must never see one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xlatrain.host.host_memory import LIMIT_VARIABLE, available_host_memory


def storageless(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of this geometry that takes no memory."""
    elements = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if 0 not in size else 0
    storage = torch._C._construct_storage_from_data_pointer(0, torch.device("cpu"), elements * dtype.itemsize)
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        tensor = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))
    if elements:
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def storageless_like(tensor: torch.Tensor) -> torch.Tensor:
    """A storageless tensor with the shape, strides and dtype of ``tensor``."""
    return storageless(tensor.shape, tensor.stride(), tensor.dtype)


_ALONE = 2  # references to a storage that only its tensor has: the tensor's and ours


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary one of this process's memory, which nothing else shows or shares.

    No view does, no array of NumPy's (``.numpy()``), no other process (``share_memory_()``). An array that ``from_dlpack``
    made is not seen: it holds the tensor itself, as what is left of a capture does.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.requires_grad or tensor.device.type != "cpu":
        return False
    if tensor.layout != torch.strided or tensor._base is not None or tensor.is_inference():
        return False
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.nbytes and storage.resizable()  # that of an array, or given to one, is not
    return whole and not storage.is_shared() and torch._C._storage_Use_Count(storage._cdata) <= _ALONE


def is_shown(tensor: torch.Tensor, own: int) -> bool:
    """Whether more than ``own`` tensors show the memory of one: a view, an array of NumPy's; 0: it has none of its own."""
    return own > 0 and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) >= _ALONE + own


class HostCopies:
    """The storageless tensors of one model, and which of them have memory now.

    Args:
        give_up: told the name of a tensor whose memory goes, while its values are still there.

    Attributes:
        limited: whether a copy must fit :func:`~xlatrain.host.host_memory.available_host_memory`.
        total_bytes: what copies of all of them would take.
    """

    def __init__(self, give_up: Callable[[str], None]) -> None:
        self.limited = True
        self.total_bytes = 0
        self._give_up = give_up
        self._tensors: dict[str, torch.Tensor] = {}
        self._held: dict[str, None] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor without memory."""
        self._tensors[name] = tensor
        with torch._C.DisableTorchFunctionSubclass():
            self.total_bytes += tensor.nbytes

    def lacks(self, name: str) -> bool:
        """Whether ``name`` has no memory now."""
        return name in self._tensors and name not in self._held

    def remove(self, name: str) -> None:
        """Stop counting a tensor that leaves the mesh; it keeps no memory here."""
        if name in self._held:
            self._drop(name)
        self._tensors.pop(name, None)

    def make_room(self, name: str) -> None:
        """Give ``name`` memory for its values, and take it from the tensors that were read longest ago if it is scarce.

        Raises:
            MemoryError: the tensor, whole, does not fit.
        """
        if name not in self._tensors or name in self._held:
            return
        tensor = self._tensors[name]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if self.limited:
                self._free(name, tensor)
            tensor.data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self._held[name] = None

    def drop_all(self) -> None:
        """Take the memory of all: their values are stale."""
        for name in list(self._held):
            self._drop(name)

    def _free(self, name: str, tensor: torch.Tensor) -> None:
        """Free memory for ``tensor``, from the tensors that were read longest ago.

        Raises:
            MemoryError: there is not enough.
        """
        for oldest in list(self._held):
            if tensor.nbytes <= self._spare():
                return
            if torch._C._storage_Use_Count(self._tensors[oldest].untyped_storage()._cdata) <= _ALONE:
                self._give_up(oldest)
                self._drop(oldest)
        if tensor.nbytes > (spare := self._spare()):
            raise MemoryError(
                f"{name!r} of shape {tuple(tensor.shape)} is sharded; whole, it takes {_size(tensor.nbytes)}, and this host "
                f"can spare {_size(max(spare, 0))} for copies. Compute with it in a step, save a checkpoint (it is written "
                f"shard by shard), or allow more with {LIMIT_VARIABLE}=<bytes>"
            )

    def _spare(self) -> int:
        return available_host_memory(sum(self._tensors[name].nbytes for name in self._held))

    def _drop(self, name: str) -> None:
        tensor = self._tensors[name]
        with torch._C.DisableTorchFunctionSubclass():
            tensor.data = storageless_like(tensor)
        del self._held[name]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
