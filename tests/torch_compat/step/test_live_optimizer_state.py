"""Optimizers whose state is on the mesh get their own back, however a run ends."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from torch_compat.step.optimizers.live_state import LiveOptimizerStates


def test_arrays_that_a_failed_step_took_with_it_do_not_hide_its_error() -> None:
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1) for _ in range(2)]
    own = [optimizer.state for optimizer in optimizers]

    def fetch() -> None:
        raise RuntimeError("Array has been deleted")

    states = LiveOptimizerStates(optimizers, fetch, lambda: None)
    optimizers[0].state = defaultdict(dict)  # a hook replaced it, so that the next step wants those of all
    with pytest.raises(RuntimeError, match="deleted"):
        states.push()
    states.end(failed=True)
    assert all(optimizer.state is before for optimizer, before in zip(optimizers, own, strict=True))
