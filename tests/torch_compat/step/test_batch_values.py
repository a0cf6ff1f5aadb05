"""Stand-ins by which values that a step's Python asked for are compared from step to step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torch_compat.step.host.batch_values import comparable

ZEROS = [(0.0, -0.0), ([0.0], [-0.0]), (np.float32(0.0), np.float32(-0.0)), (torch.tensor(0.0), torch.tensor(-0.0))]


@pytest.mark.parametrize(("one", "other"), [*ZEROS, (1.0, 2.0), ([1], (1,))])
def test_values_that_a_step_can_tell_apart_are_not_equal(one: object, other: object) -> None:
    assert comparable(one) != comparable(other)
    assert comparable(one) == comparable(one)


def test_not_a_number_is_equal_to_itself() -> None:
    assert comparable(math.nan) == comparable(float("nan"))
    assert comparable([math.nan]) == comparable([math.nan])
