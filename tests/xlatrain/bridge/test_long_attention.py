"""Attention over long sequences: its memory grows with the length, not with the square of it."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding, PartitionSpec
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.xlatrain.bridge._compare import as_host, assert_same, run_captured, with_gradients
from xlatrain.bridge.capture.attention import float32_attention, fused_attention
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.capture.masks.band import CAUSAL
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.lower.lowerings import attention
from xlatrain.mesh.mesh import make_mesh


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)


def operands(length: int, heads: int = 4, key_heads: int = 2, width: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, length, width, generator=generator, requires_grad=True) for h in (heads, key_heads, key_heads)]


MASKS = {
    "none": None,
    "rows": torch.arange(256)[:, None] // 9 >= torch.arange(256) // 9,
    "columns": (torch.arange(256) % 5 != 0)[None],
    "added": torch.linspace(-3, 3, 256 * 256).view(1, 1, 256, 256),
    "of heads": (torch.arange(4 * 256 * 256) % 7 != 0).view(1, 4, 256, 256),
}


@pytest.mark.parametrize(("mask", "is_causal"), [*((name, False) for name in MASKS), ("none", True)])
def test_blocks_of_queries_give_the_same(mask: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_SCORES", 64 * 256)
    assert attention._blocks(256, 256, 64 * 256) == 4
    args = (*operands(256), MASKS[mask], is_causal)
    with fused_attention(), float32_attention():
        found = run_captured(with_gradients(attend), *args)
    assert_same(found, as_host(with_gradients(attend)(*args)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("queries", "keys"), [(128, 128), (131, 131), (200, 96), (96, 200), (513, 513)])
def test_stretches_of_causal_attention_give_the_same(queries: int, keys: int) -> None:
    q, (_, k, v) = operands(queries)[0], operands(keys)
    with fused_attention(), float32_attention():
        found = run_captured(with_gradients(attend), q, k, v, None, True)
    assert_same(found, as_host(with_gradients(attend)(q, k, v, None, True)), rtol=2e-5, atol=2e-5)


def test_stretches_cover_the_queries_and_see_what_is_not_masked() -> None:
    assert attention._stretches(64, 64, CAUSAL) == [(0, 64, 0, 64)]
    assert attention._stretches(512, 512, CAUSAL) == [
        (0, 128, 0, 128),
        (128, 256, 0, 256),
        (256, 384, 0, 384),
        (384, 512, 0, 512),
    ]
    assert attention._stretches(131, 100, CAUSAL) == [(0, 66, 0, 66), (66, 131, 0, 100)]


def test_on_cpus_most_of_what_is_masked_is_not_computed() -> None:
    args = *operands(512, key_heads=4), None, True
    with fused_attention(), float32_attention():
        captured = capture(with_gradients(attend), *args)
    arrays = [as_host(arg) for arg in args[:3]]
    text = jax.jit(lower(captured, platform="cpu")).lower(arrays, None).as_text()
    assert "128x512x" in text and "512x512x" not in text


@pytest.mark.usefixtures("compiled_as_for_users")
def test_stretches_of_split_heads_and_rows_need_no_other_device() -> None:
    args = [torch.cat([x.detach()] * 4).requires_grad_() for x in operands(128)]  # 4 rows; 4 heads of queries, 2 of keys
    with fused_attention(), float32_attention():
        captured = capture(with_gradients(attend), *args, None, True)
    split = NamedSharding(make_mesh({"data": 4, "tensor": 2}), PartitionSpec("data", "tensor"))
    placed = [jax.device_put(as_host(arg), split) for arg in args]
    run = jax.jit(lower(captured, partitioned=True), out_shardings=[split] * len(captured.outputs))
    compiled = run.lower(placed, None).compile()
    assert not re.search(r"all-\w+\(|collective-\w+\(|reduce-scatter\(", compiled.as_text() or "")
    found = captured.unflatten([np.asarray(x) for x in compiled(placed, None)])
    assert_same(found, as_host(with_gradients(attend)(*args, None, True)), rtol=2e-5, atol=2e-5)


def test_long_rows_are_in_the_smallest_blocks() -> None:
    assert attention._blocks(32768, 32768, 1 << 20) == 512  # of 64 queries, although they have two million scores


@pytest.mark.parametrize("same", [False, True])
def test_its_gradient_can_be_differentiated(same: bool) -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        inputs = (q, q, q) if same else (q, k, v)
        sources = (q,) if same else (q, v)  # the keys need none
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        grads = torch.autograd.grad(out.pow(2).sum(), sources, create_graph=True)
        return list(torch.autograd.grad([grad.pow(2).sum() for grad in grads], sources))

    q, k, v = operands(8, key_heads=4)
    args = (q, k.detach(), v)
    with fused_attention(), float32_attention():
        found = run_captured(fn, *args)
    with sdpa_kernel([SDPBackend.MATH]):  # torch's own kernel on CPUs cannot
        assert_same(found, as_host(fn(*args)), rtol=1e-4, atol=1e-5)


def test_the_gradient_of_one_with_dropout_cannot() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), q)[0]

    with fused_attention(), float32_attention(), pytest.raises(CaptureError, match="attention with dropout that is one op here"):
        capture(fn, *operands(8, key_heads=4))


ODD = {
    "vmap": lambda q: torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(q),
    "no keys": lambda q: F.scaled_dot_product_attention(q, q[..., :0, :], q[..., :0, :]),
}


@pytest.mark.parametrize("case", ODD)
def test_what_the_op_does_not_compute_is_left_to_torch(case: str) -> None:
    q = operands(8)[0]
    with fused_attention(), float32_attention():
        found = run_captured(with_gradients(ODD[case]), q)
    assert_same(found, as_host(with_gradients(ODD[case])(q)), rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("compiled_as_for_users")
def test_memory_is_linear_in_the_length() -> None:
    def temporaries(length: int) -> int:
        with fused_attention():  # so many scores that float32 is one op too
            captured = capture(with_gradients(attend), *operands(length, key_heads=4), None, True)
        shapes = [jax.ShapeDtypeStruct(spec.shape, np.float32) for spec in captured.inputs]
        memory = jax.jit(lower(captured)).lower(shapes, None).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    short, long = temporaries(2048), temporaries(8192)
    assert short < 4 * 2048 * 2048 * 4 * 1.5  # two blocks of scores and what is linear, not four whole matrices
    assert long < 5 * short
