"""Runs a function of tensors in torch eager and through capture, lowering and ``jax.jit``, and compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
import torch.utils._pytree as pytree

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.host import as_numpy

OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": True}
"""As users' programs are compiled but for LLVM's optimizations, which double the time that the tests take."""


def run_captured(fn: Callable[..., Any], *args: Any, seed: int = 0) -> Any:
    """``fn(*args)`` through the bridge, with numpy arrays in place of its tensors."""
    captured = capture(fn, *args)
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    inputs = [jax.numpy.asarray(as_numpy(tensor), jax_dtype(tensor.dtype)) for tensor in tensors]
    run = jax.jit(lower(captured, platform="cpu"), compiler_options=OPTIONS)
    outputs = run(inputs, jax.random.key(seed) if captured.uses_random else None)
    return captured.unflatten([np.asarray(output) for output in outputs])


def as_host(value: Any) -> Any:
    """Tensors as numpy arrays of the dtype in which the bridge computes them."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: as_numpy(tensor.detach()).astype(jax_dtype(tensor.dtype)), value)


def assert_same(got: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Both are the same pytree, equal in shape, dtype and, within the tolerances, in value."""
    got_leaves, got_spec = pytree.tree_flatten(got)
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    assert got_spec == expected_spec
    for one, other in zip(got_leaves, expected_leaves, strict=True):
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype
            wide = np.float32 if other.dtype.kind == "V" or other.dtype.itemsize == 2 else other.dtype
            np.testing.assert_allclose(one.astype(wide), other.astype(wide), rtol=rtol, atol=atol)
        else:
            assert one == other


def assert_matches_eager(fn: Callable[..., Any], *args: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """``fn(*args)`` gives the same through the bridge as in eager mode."""
    expected = as_host(fn(*pytree.tree_map_only(torch.Tensor, _leaf, args)))
    assert_same(run_captured(fn, *args), expected, rtol=rtol, atol=atol)


def through_bridge(fn: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """``fn(*tensors)`` through capture, lowering and ``jax.jit``, with JAX arrays in place of its tensors."""
    captured = capture(fn, *tensors)
    return captured.unflatten(jax.jit(lower(captured))([as_host(tensor) for tensor in tensors], None))


def assert_as_eager(fn: Callable[..., Any], *tensors: torch.Tensor, rtol: float = 1e-6) -> None:
    """``fn``, which gives tensors, gives the same values (NaN equal to NaN, -0 equal to 0) as torch, of whatever dtype."""
    expected, actual = fn(*tensors), through_bridge(fn, *tensors)
    expected, actual = ([x] if not isinstance(x, list | tuple) else x for x in (expected, actual))
    assert len(expected) == len(actual)
    for want, got in zip(expected, actual, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), as_numpy(want).astype(np.float64), rtol=rtol, atol=1e-6)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with the gradients, by each tensor that requires one, of a fixed weighted sum of its floating outputs."""

    def value_and_gradients(*args: Any) -> tuple[Any, list[torch.Tensor | None]]:
        value = fn(*args)
        sources = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        outputs = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not sources or not outputs:
            return value, []
        total = sum((output * _weights(output)).sum() for output in outputs)
        return value, list(torch.autograd.grad(total, sources, allow_unused=True))

    return value_and_gradients


def loss_and_gradients(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """``fn``, which gives a loss, with the gradients by the tensors among its arguments that require one."""

    def step(*args: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        loss = fn(*args)
        return loss, torch.autograd.grad(loss, [arg for arg in args if arg.requires_grad], allow_unused=True)

    return step


def _weights(output: torch.Tensor) -> torch.Tensor:
    """Different weights for different elements, so that misplaced gradients show; exact in every floating dtype."""
    count = torch.arange(output.numel()).reshape(output.shape)
    return ((count * 7 % 11 - 4) / 4).to(output.real.dtype if output.is_complex() else output.dtype)


def floats(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> torch.Tensor:
    """Standard normal values."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)


Case = tuple[str, Callable[..., Any], Sequence[Any]]
