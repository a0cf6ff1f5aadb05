"""``tensor.data = value`` while a step is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_DATA = torch._C.TensorBase.__dict__["data"]


def _get(self: torch.Tensor) -> torch.Tensor:
    return _DATA.__get__(self)


def _set(self: torch.Tensor, value: torch.Tensor) -> None:
    # set_ moves the tensor to value's storage, as assigning .data does: earlier views keep the old values. Below autograd, which
    # would take the tensor for another one, without a part in what was computed of it before; uncounted, too, as in torch.
    with torch.autograd._unsafe_preserve_version_counter(self), torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateImportUsage]
        torch.ops.aten.set_.source_Tensor(self, value)


@contextlib.contextmanager
def assignable_data(kind: type[torch.Tensor]) -> Iterator[None]:
    """Within the block assigning ``.data`` of a traced tensor, of class ``kind``, is captured; torch ignores it silently."""
    kind.data = property(_get, _set)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        del kind.data
