"""``torch.inference_mode`` where there are no values: it is ``torch.no_grad``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from xlatrain.bridge.patches import patched


@contextlib.contextmanager
def without_inference_mode() -> Iterator[None]:
    """``torch.inference_mode`` is ``torch.no_grad`` within the block, and not in force.

    Its tensors have no versions: they cannot be traced, nor detached in a capture, and torch ends the process where a view is
    taken of one without memory. Numbers are the same.
    """
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(patched([(torch._C, "_InferenceMode", lambda mode: torch.set_grad_enabled(not mode))]))
        yield
