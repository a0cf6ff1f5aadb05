"""Attention by cuDNN, as far as it can be seen without a GPU: what is lowered for one, and what is done around the kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from xlatrain.bridge.capture.attention import fused_attention
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.lower.kernels import cudnn


def training(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Attention as a step has it: the result, and the gradients of a loss."""
    out = F.scaled_dot_product_attention(q, k, v, **options)
    return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))


def inputs(heads: int = 4, dtype: torch.dtype = torch.bfloat16, features: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(2, number, 8, features, dtype=dtype) for number in (4, heads, heads)]
    return [tensor.requires_grad_() for tensor in made]


def lowered(*args: torch.Tensor, **options: Any) -> Any:
    with fused_attention():
        captured = capture(functools.partial(training, **options), *args)
    key = jax.random.key(0) if captured.uses_random else None
    return jax.jit(lambda arrays: lower(captured)(arrays, key))


def text_for(platform: str, *args: torch.Tensor, **options: Any) -> str:
    arrays = [jax.ShapeDtypeStruct(tuple(x.shape), jnp.dtype(str(x.dtype).removeprefix("torch."))) for x in args]
    return lowered(*args, **options).trace(arrays).lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts that JAX asks of a GPU while it traces; nothing of ours."""
    from jax._src.cudnn import fused_attention_stablehlo as of_jax

    monkeypatch.setattr(cudnn, "_capability", lambda: (9, 0))
    monkeypatch.setattr(of_jax, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(of_jax, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(of_jax, "is_cuda_compute_capability_equal", lambda capability: False)


@pytest.mark.usefixtures("hopper")
def test_a_step_on_a_gpu_calls_the_flash_kernels() -> None:
    for_gpu = text_for("cuda", *inputs(), is_causal=True)
    assert "__cudnn$fmhaSoftmax" in for_gpu
    assert "__cudnn$fmhaSoftmaxBackward" in for_gpu
    assert "CAUSAL" in for_gpu
    assert "__cudnn" not in text_for("cpu", *inputs(), is_causal=True)  # another platform in the same process


@pytest.mark.usefixtures("hopper")
def test_what_the_kernel_does_otherwise_is_left_to_xla() -> None:
    q, k, v = inputs()
    shorter = [x.detach()[:, :, :6].clone().requires_grad_() for x in (k, v)]
    for args, options in (
        (inputs(dtype=torch.float32), {}),
        (inputs(features=12), {}),
        ([q, *shorter], {"is_causal": True}),
        ([q, k, v], {"attn_mask": torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) > 0.3}),
        ([q, k, v], {"dropout_p": 0.5}),
    ):
        assert "__cudnn" not in text_for("cuda", *args, **options), (args[0].dtype, options)


@pytest.mark.parametrize(("heads", "is_causal"), [(4, False), (2, True)])
def test_layouts_around_the_kernel(heads: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args = inputs(heads)
    arrays = [jnp.asarray(x.detach().float().numpy(), jnp.bfloat16) for x in args]
    options = {"is_causal": is_causal, "enable_gqa": heads != 4, "scale": 0.3}
    expected = lowered(*args, **options)(arrays)
    monkeypatch.setattr(cudnn, "_capability", lambda: (8, 0))
    kernel = functools.partial(jax.nn.dot_product_attention, implementation="xla")  # in place of cuDNN's
    monkeypatch.setattr(cudnn, "_kernel", lambda causal, scale: functools.partial(kernel, is_causal=causal, scale=scale))
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, cuda, default: cuda(*arrays))
    found = lowered(*args, **options)(arrays)
    for one, other in zip(found, expected, strict=True):
        wanted = np.asarray(other, np.float32)
        assert np.linalg.norm(np.asarray(one, np.float32) - wanted) < 0.02 * np.linalg.norm(
            wanted
        )  # roundings to bfloat16 differ


def test_without_a_gpu_nothing_is_asked_for() -> None:
    q = jnp.zeros((2, 4, 8, 16), jnp.bfloat16)
    assert not cudnn.computes(q, q, q, None, True, 0.0)
