"""Precision of float32 matrix products on accelerators."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

_MATMUL = {"highest": "highest", "high": "high", "medium": "default"}


def matmul_precision(name: str) -> AbstractContextManager[object]:
    """A context in which traced float32 matmuls have torch's precision ``name``.

    ``highest`` is full float32, ``high`` three bfloat16 passes (or TF32), ``medium`` one bfloat16 pass; see
    ``torch.set_float32_matmul_precision``.

    Raises:
        ValueError: another name.
    """
    if name not in _MATMUL:
        raise ValueError(f"float32 matmul precision {name!r}; expected one of {', '.join(_MATMUL)}")
    return jax.default_matmul_precision(_MATMUL[name])
