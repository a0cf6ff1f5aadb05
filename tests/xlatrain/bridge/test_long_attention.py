"""Attention over long sequences: its memory grows with the length, not with the square of it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.xlatrain.bridge._compare import as_host, assert_same, run_captured, with_gradients
from xlatrain.bridge.attention import float32_attention, fused_attention
from xlatrain.bridge.capture import capture
from xlatrain.bridge.interpret import lower
from xlatrain.bridge.lowerings import attention


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
    assert attention._blocks(256, 256) == 4
    args = (*operands(256), MASKS[mask], is_causal)
    with fused_attention(), float32_attention():
        found = run_captured(with_gradients(attend), *args)
    assert_same(found, as_host(with_gradients(attend)(*args)), rtol=2e-5, atol=2e-5)


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
