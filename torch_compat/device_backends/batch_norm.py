"""BatchNorm's running variance on torch-xla, which keeps the biased variance where torch keeps the unbiased one.

torch_xla 2.9's ``native_batch_norm`` moves ``running_var`` towards the sum of squares over n; torch's documentation and its other
devices divide by n - 1. What is normalised in training is the same; evaluation and checkpoints would not be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from xlatrain.bridge.patches import patched

_batch_norm = F.batch_norm


@contextlib.contextmanager
def unbiased_running_variance() -> Iterator[None]:
    """Let ``torch.nn.functional.batch_norm``, which the layers call, update ``running_var`` on XLA as torch does."""
    with patched([(F, "batch_norm", _unbiased)]):
        yield


def _unbiased(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    rest = (weight, bias, training, momentum, eps)
    if not training or running_var is None or input.device.type != "xla":
        return _batch_norm(input, running_mean, running_var, *rest)
    moved = running_var.clone()  # autograd keeps what the operation was given: it must not be changed after it
    output = _batch_norm(input, running_mean, moved, *rest)
    with torch.no_grad():
        values = input.numel() // input.shape[1]
        of_batch = moved - running_var * (1 - momentum)
        running_var.copy_(moved + of_batch / (values - 1))  # the part of this batch times n / (n - 1)
    return output
