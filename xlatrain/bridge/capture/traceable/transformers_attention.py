"""Attention of the ``transformers`` library while a step is captured: other ways to the same result."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from xlatrain.bridge.patches import patched


@contextlib.contextmanager
def grouped_attention() -> Iterator[None]:
    """Within the block its keys are not repeated, and the masks of packed sequences are causal by place, not by position.

    It repeats keys where torch's own kernels take no mask together with grouped queries; ours do. In packed sequences
    positions ascend by one in each, so that who is before whom in a sequence is the same by place.
    """
    masking = sys.modules.get("transformers.masking_utils")
    attention = sys.modules.get("transformers.integrations.sdpa_attention")
    patches: list[tuple[Any, str, Any]] = []
    if hasattr(attention, "use_gqa_in_sdpa"):
        patches.append((attention, "use_gqa_in_sdpa", lambda *_, **__: True))
    if hasattr(masking, "remap_positions_for_packed_sequence") and hasattr(masking, "causal_mask_function"):
        patches.append((masking, "remap_positions_for_packed_sequence", _by_place(masking)))
    with patched(patches):
        yield


def _by_place(masking: Any) -> Callable[..., Any]:
    original, causal = masking.remap_positions_for_packed_sequence, masking.causal_mask_function

    def remap(mask_function: Callable[..., Any], position_ids: Any) -> Callable[..., Any]:
        return mask_function if mask_function is causal else original(mask_function, position_ids)

    return remap
