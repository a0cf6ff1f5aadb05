"""Host tensors and numpy arrays, sharing memory."""

from __future__ import annotations

import numpy as np
import torch

from xlatrain.bridge.tensors.dtypes import numpy_dtype, torch_dtype

_BITS = {1: torch.uint8, 2: torch.int16}


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor's values as numpy, sharing its memory wherever numpy can describe it.

    bfloat16 and float8 come as ``ml_dtypes``. A tensor on another torch device is copied.

    Raises:
        TypeError: a sparse, nested or quantised tensor.
    """
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        pass
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError(
            f"a {tensor.layout} tensor of {tensor.dtype} has no numpy form; only dense tensors go to the devices: densify it "
            "(`tensor.to_dense()`), a batch's tensors in collate_fn"
        )
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    dtype = numpy_dtype(host.dtype)
    if dtype.kind == "V" or dtype.name.startswith(("bfloat16", "float8")):
        return host.contiguous().view(_BITS[host.element_size()]).numpy().view(dtype)
    return host.numpy()


def borrowed(tensor: torch.Tensor) -> np.ndarray:
    """:func:`as_numpy` for a look, after which torch knows that the memory is the tensor's alone, where NumPy has its dtype.

    ``tensor.numpy()`` marks the memory for ever as one that is shared (``resizable()``).
    """
    try:
        return np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError):
        return as_numpy(tensor)


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A host tensor with ``array``'s values, sharing memory where numpy allows it (bfloat16 and float8 through their bits)."""
    dtype = torch_dtype(array.dtype)
    array = np.asarray(array)
    if dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        bits = np.int16 if array.itemsize == 2 else np.uint8
        return torch.from_numpy(np.array(array.view(bits))).view(dtype)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
