"""A module that knows where it is: ``device`` and ``dtype`` follow ``.to()`` and its relatives.

API: ``lightning.fabric.utilities.device_dtype_mixin``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import nn

from torch_compat.utilities.rank_zero import WarningCache


class _DeviceDtypeModuleMixin(nn.Module):
    __jit_unused_properties__: ClassVar[list[str]] = ["device", "dtype"]

    def __init__(self) -> None:
        super().__init__()
        self._dtype: str | torch.dtype = torch.get_default_dtype()
        self._device: torch.device = torch.get_default_device()

    @property
    def dtype(self) -> str | torch.dtype:
        """The floating-point dtype that the module was last moved to."""
        return self._dtype

    @dtype.setter
    def dtype(self, new_dtype: str | torch.dtype) -> None:
        raise RuntimeError("Cannot set the dtype explicitly. Please use module.to(new_dtype).")

    @property
    def device(self) -> torch.device:
        """The torch device that the module was last moved to.

        During a run on a mesh it is the device that user code names (``x.to(self.device)``); the arrays are on the mesh.
        """
        if self._device.type == "cuda" and self._device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return self._device

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """``torch.nn.Module.to``; ``device`` and ``dtype`` follow. For a CUDA device that torch lacks see :meth:`cuda`."""
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]  # pyright: ignore[reportAttributeAccessIssue]
        if device is not None and device.type == "cuda" and not torch.cuda.is_available():
            _notices.info(_NO_CUDA_NOTICE)
            return self if dtype is None else self.to(dtype)
        _update_properties(self, device=device, dtype=dtype)
        return super().to(*args, **kwargs)

    def cuda(self, device: torch.device | int | None = None) -> Self:
        """``torch.nn.Module.cuda``. Where torch has no CUDA the accelerator is JAX's: the module stays, one notice says so."""
        if not torch.cuda.is_available():
            _notices.info(_NO_CUDA_NOTICE)
            return self
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        elif isinstance(device, int):
            device = torch.device("cuda", device)
        _update_properties(self, device=torch.device(device))
        return super().cuda(device)

    def cpu(self) -> Self:
        """``torch.nn.Module.cpu``; ``device`` follows."""
        _update_properties(self, device=torch.device("cpu"))
        return super().cpu()

    def type(self, dst_type: str | torch.dtype) -> Self:
        """``torch.nn.Module.type``; ``dtype`` follows."""
        _update_properties(self, dtype=dst_type)
        return super().type(dst_type)

    def float(self) -> Self:
        """``torch.nn.Module.float``; ``dtype`` follows."""
        _update_properties(self, dtype=torch.float)
        return super().float()

    def double(self) -> Self:
        """``torch.nn.Module.double``; ``dtype`` follows."""
        _update_properties(self, dtype=torch.double)
        return super().double()

    def half(self) -> Self:
        """``torch.nn.Module.half``; ``dtype`` follows."""
        _update_properties(self, dtype=torch.half)
        return super().half()

    def bfloat16(self) -> Self:
        """``torch.nn.Module.bfloat16``; ``dtype`` follows."""
        _update_properties(self, dtype=torch.bfloat16)
        return super().bfloat16()


_notices = WarningCache()  # Said once.
_NO_CUDA_NOTICE = (
    "A move to CUDA is left out: torch has no CUDA here; the module is placed by the Trainer on the devices that JAX sees."
)


def _update_properties(root: nn.Module, device: torch.device | None = None, dtype: str | torch.dtype | None = None) -> None:
    for module in root.modules():
        if not isinstance(module, _DeviceDtypeModuleMixin):
            continue
        if device is not None:
            module._device = device
        if dtype is not None:
            module._dtype = dtype
