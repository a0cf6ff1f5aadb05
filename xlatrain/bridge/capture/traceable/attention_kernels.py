"""Torch's choice between attention kernels, while a function is captured: none of them is in a program, which has its own.

With all of them but the plain one off, captured attention is products and a softmax. Code that chooses kernels for a block
(``torch.nn.attention.sdpa_kernel``) reads and sets a copy of the choice. A choice that stays is refused: the caller's later
attention would not have it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.patches import patched

_NAMES = [found[1] for name in dir(torch._C) if (found := re.fullmatch(r"_get_(\w+)_sdp_enabled", name))]


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Capture attention as plain products; the block's code may choose kernels, but for itself alone.

    Raises:
        CaptureError: when the block ends, another kernel is chosen than when it began.
    """
    before = {name: getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in _NAMES}
    chosen = dict(before)
    getters = [(torch._C, f"_get_{name}_sdp_enabled", partial(chosen.__getitem__, name)) for name in _NAMES]
    setters = [(torch._C, f"_set_sdp_use_{name}", partial(chosen.__setitem__, name)) for name in _NAMES]
    with sdpa_kernel([SDPBackend.MATH]), patched([*getters, *setters]):
        yield
    if changed := [name for name in _NAMES if chosen[name] != before[name]]:
        raise CaptureError(
            f"the step leaves the attention kernel {changed[0]!r} {'on' if chosen[changed[0]] else 'off'}; choose kernels before "
            "the run, or for a block: with torch.nn.attention.sdpa_kernel([…])"
        )
