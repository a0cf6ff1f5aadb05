"""torch dtypes and the JAX dtypes that compute them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xlatrain.bridge.errors import DtypeError

_TO_NUMPY: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(jnp.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(jnp.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(jnp.float8_e5m2),
}
_TO_TORCH = {numpy_dtype: torch_dtype for torch_dtype, numpy_dtype in _TO_NUMPY.items()}


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The dtype in which JAX computes a torch tensor of ``dtype``: 64-bit types narrow unless x64 is enabled.

    Raises:
        DtypeError: torch's quantised and other exotic dtypes.
    """
    if dtype not in _TO_NUMPY:
        raise DtypeError(f"{dtype} has no JAX counterpart; cast the tensor to one of {sorted(map(str, _TO_NUMPY))}")
    return jax.dtypes.canonicalize_dtype(_TO_NUMPY[dtype])


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The numpy dtype of the same width as torch's ``dtype``."""
    return _TO_NUMPY[dtype]


def torch_dtype(dtype: np.typing.DTypeLike) -> torch.dtype:
    """The torch dtype of the same width as a numpy or JAX ``dtype``."""
    return _TO_TORCH[np.dtype(dtype)]
