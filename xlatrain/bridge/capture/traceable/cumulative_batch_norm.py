"""Batch normalisation with ``momentum=None`` while a step is captured: the share of a batch is a tensor, not a number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from xlatrain.bridge.patches import patched


def _cumulative_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """``_BatchNorm.forward`` where running statistics are plain means over all batches.

    PyTorch reads ``float(num_batches_tracked)``, which a compiled step cannot. With a momentum of 1 the batch's own statistics
    come out as "running" ones; their mean over batches is kept in tensors.
    """
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(self.running_mean), torch.ones_like(self.running_var)
    output = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    share = 1.0 / self.num_batches_tracked
    with torch.no_grad():
        self.running_mean.copy_(share * mean + (1 - share) * self.running_mean)
        self.running_var.copy_(share * var + (1 - share) * self.running_var)
    return output


@contextlib.contextmanager
def traceable_cumulative_batch_norm() -> Iterator[None]:
    """Within the block batch norm layers with ``momentum=None`` that train and track statistics can be captured."""
    original = _BatchNorm.forward

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        cumulative = self.momentum is None and self.training and self.track_running_stats
        if not cumulative or self.num_batches_tracked is None:
            return original(self, input)
        return _cumulative_forward(self, input)

    with patched([(_BatchNorm, "forward", forward)]):
        yield
