"""Whose memory a tensor has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from xlatrain.bridge.tensors.host_copies import is_alone


@pytest.mark.parametrize(
    "shown_by",
    [
        lambda tensor: tensor[1:],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.numpy(),
        lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
        lambda tensor: tensor.share_memory_(),
    ],
    ids=["view", "detached", "numpy", "parameter", "other process"],
)
def test_memory_that_others_see(shown_by: Callable[[torch.Tensor], Any]) -> None:
    tensor = torch.zeros(4)
    assert is_alone(tensor)
    other = shown_by(tensor)
    assert not is_alone(tensor)
    del other


def test_memory_that_others_saw() -> None:
    tensor = torch.zeros(4)
    for shown_by in (lambda: tensor[1:], lambda: np.from_dlpack(tensor)):
        other = shown_by()
        del other
    assert is_alone(tensor)
