"""No kernel of torch's for attention is in a capture, and nobody who asks is told so."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.errors import CaptureError

HEADS = torch.zeros(1, 2, 4, 8)


def test_a_choice_for_a_block_is_read_there_and_is_in_no_program() -> None:
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            seen.append(torch.backends.cuda.math_sdp_enabled())
            x = scaled_dot_product_attention(x, x, x)
        seen.append(torch.backends.cuda.math_sdp_enabled())
        return x

    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        found = capture(function, HEADS)
        assert torch.backends.cuda.mem_efficient_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    assert seen[:2] == [False, True]
    assert not [node for node in found.graph.graph.nodes if "flash" in str(node.target)]


def test_a_choice_that_stays_is_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.backends.cuda.enable_flash_sdp(False)
        return scaled_dot_product_attention(x, x, x)

    with pytest.raises(CaptureError, match="the step leaves the attention kernel 'flash' off; choose kernels before the run"):
        capture(function, HEADS)
    assert torch.backends.cuda.flash_sdp_enabled()
