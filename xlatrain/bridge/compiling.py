"""What libraries are told while a step is captured: that it is being compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def _skip_check(*_: Any, **__: Any) -> None:
    """In place of ``torch._check_tensor_all_with``, which reads the values of a tensor in order to raise."""


@contextlib.contextmanager
def compiling_state() -> Iterator[None]:
    """Within the block ``torch.compiler.is_compiling()`` is true, as while ``torch.compile`` or ``torch.export`` trace.

    Libraries (transformers' attention masks and experts, ``torch.optim``, ``nn.TransformerEncoder``) then take the path without
    data-dependent branches. Checks of tensor values (``torch._check_tensor_all``) are skipped: their values are not known.
    """
    saved = torch.compiler._is_compiling_flag, torch._check_tensor_all_with
    torch.compiler._is_compiling_flag, torch._check_tensor_all_with = True, _skip_check
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch._check_tensor_all_with = saved
