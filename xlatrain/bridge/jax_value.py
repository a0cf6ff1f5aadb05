"""Values that a JAX function makes, as an op of torch: one that a tape records (:mod:`xlatrain.bridge.lazy_init`)."""

from __future__ import annotations

import weakref

import jax
import numpy as np
import torch

from xlatrain.bridge.fake_kernels import fake_kernel
from xlatrain.bridge.tensors.dtypes import torch_dtype
from xlatrain.bridge.tensors.host import from_numpy
from xlatrain.step.initial_value import InitialValue

_LIBRARY = torch.library.Library("xlatrain", "FRAGMENT")
_LIBRARY.define("jax_value(int[] size, ScalarType dtype, str program) -> Tensor")
_PROGRAMS: weakref.WeakValueDictionary[str, InitialValue] = weakref.WeakValueDictionary()


def jax_value(value: InitialValue) -> tuple[torch.Tensor, InitialValue]:
    """A tensor with these values, recorded where a :func:`deferred_init` is active; the second is to be kept as long as it."""
    value = _PROGRAMS.setdefault(value.digest, value)
    return torch.ops.xlatrain.jax_value(list(value.spec.shape), torch_dtype(value.spec.dtype), value.digest), value


def value_of(program: str) -> InitialValue:
    """The values that a node of the tape names.

    Raises:
        RuntimeError: nobody has kept them.
    """
    if (value := _PROGRAMS.get(program)) is None:
        raise RuntimeError("the JAX module that a deferred tensor belongs to is gone: keep it until its values are made")
    return value


@fake_kernel(_LIBRARY, "jax_value")
def _fake(size: list[int], dtype: torch.dtype, program: str) -> torch.Tensor:
    """The shape."""
    return torch.empty(size, dtype=dtype)


@torch.library.impl(_LIBRARY, "jax_value", "CompositeExplicitAutograd")
def _eager(size: list[int], dtype: torch.dtype, program: str) -> torch.Tensor:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        # without compiler_options: run once; initializers draw, and hardly compute
        return from_numpy(np.array(jax.jit(value_of(program).make)()))
