"""oneDNN is off while a function is captured, and nobody who asks is told so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.errors import CaptureError

MKLDNN: Any = torch.backends.mkldnn


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_is_what_it_is_outside(enabled: bool) -> None:
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(MKLDNN.enabled)
        with MKLDNN.flags(enabled=not seen[-1]):
            seen.append(MKLDNN.enabled)
        seen.append(torch._C._get_mkldnn_enabled())
        return x + 1

    with MKLDNN.flags(enabled=enabled):
        capture(function, torch.zeros(2))
        assert MKLDNN.enabled is enabled
    assert seen[:3] == [enabled, not enabled, enabled]


def test_a_setting_that_stays_changed_is_refused() -> None:
    before = MKLDNN.enabled

    def function(x: torch.Tensor) -> torch.Tensor:
        torch._C._set_mkldnn_enabled(not MKLDNN.enabled)  # as the setting itself does, where it may still be assigned
        return x + 1

    with pytest.raises(CaptureError, match=r"leaves torch\.backends\.mkldnn\.enabled with another value"):
        capture(function, torch.zeros(2))
    assert MKLDNN.enabled is before
