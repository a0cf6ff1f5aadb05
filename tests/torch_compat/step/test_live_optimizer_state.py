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


def test_what_user_code_takes_out_of_a_state_from_before_the_run_stays_out() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, 0.1, momentum=0.5)
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    states = LiveOptimizerStates([optimizer], lambda: None, lambda: None)
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop())
    states.push()
    assert list(optimizer.state_dict()["state"]) == [0]
