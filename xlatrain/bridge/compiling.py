"""What libraries are told while a step is captured: that it is being compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from xlatrain.bridge.attention import fused_attention
from xlatrain.bridge.ctc import ctc_lengths_as_tensors
from xlatrain.bridge.recurrent import scanned_recurrence
from xlatrain.bridge.rematerialization import kept_recomputation
from xlatrain.bridge.value_checks import without_value_checks


@contextlib.contextmanager
def compiling_state() -> Iterator[None]:
    """Within the block ``torch.compiler.is_compiling()`` is true, as while ``torch.compile`` or ``torch.export`` trace.

    Libraries (transformers' attention masks and experts, ``torch.optim``, ``nn.TransformerEncoder``) then take the path without
    data-dependent branches. Checks of tensor values are left out (``value_checks.py``), recurrent layers are loops
    (``recurrent.py``), and what checkpointing recomputes is kept apart (``rematerialization.py``).
    """
    saved = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        with without_value_checks(), scanned_recurrence(), kept_recomputation(), ctc_lengths_as_tensors(), fused_attention():
            yield
    finally:
        torch.compiler._is_compiling_flag = saved
