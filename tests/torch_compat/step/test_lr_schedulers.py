"""torch's own schedulers, run on the host on the optimizer's param groups, drive the compiled update."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim.swa_utils import SWALR

from tests.torch_compat.step._optimizer_run import FunctionalSide, TorchSide, assert_close, initial_values, noise
from torch_compat.step.optimizers.table import TableOptimizer

STEPS = 100
TOLERANCE = 5e-6
SHAPES = {"weight": (8, 4), "bias": (8,)}

Optimizer = torch.optim.Optimizer


def sgd(p: list[torch.nn.Parameter]) -> Optimizer:
    return SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.05}], lr=0.1, momentum=0.9)


def adamw(p: list[torch.nn.Parameter]) -> Optimizer:
    return AdamW(p, lr=0.01)


def adamw_tensor_lr(p: list[torch.nn.Parameter]) -> Optimizer:
    return AdamW(p, lr=torch.tensor(0.01))


def sequential(o: Optimizer) -> Any:
    warm_up = lr_scheduler.LinearLR(o, 0.1, total_iters=10)
    return lr_scheduler.SequentialLR(o, [warm_up, lr_scheduler.CosineAnnealingLR(o, 80)], milestones=[10])


def chained(o: Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 20), lr_scheduler.ExponentialLR(o, 0.98)])


CASES: dict[str, tuple[Callable[[list[torch.nn.Parameter]], Optimizer], Callable[[Any], Any]]] = {
    "LambdaLR": (sgd, lambda o: lr_scheduler.LambdaLR(o, [lambda t: 0.95**t, lambda t: 1 / (t + 1)])),
    "MultiplicativeLR": (sgd, lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.97)),
    "StepLR": (sgd, lambda o: lr_scheduler.StepLR(o, 10, 0.5)),
    "StepLR-tensor": (adamw_tensor_lr, lambda o: lr_scheduler.StepLR(o, 10, 0.5)),
    "MultiStepLR": (sgd, lambda o: lr_scheduler.MultiStepLR(o, [5, 50], 0.1)),
    "ConstantLR": (sgd, lambda o: lr_scheduler.ConstantLR(o, 0.5, 20)),
    "LinearLR": (adamw, lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=50)),
    "ExponentialLR": (sgd, lambda o: lr_scheduler.ExponentialLR(o, 0.97)),
    "PolynomialLR": (adamw, lambda o: lr_scheduler.PolynomialLR(o, 100, 2.0)),
    "CosineAnnealingLR": (adamw, lambda o: lr_scheduler.CosineAnnealingLR(o, 100, 1e-4)),
    "CosineAnnealingWarmRestarts": (adamw, lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, 2)),
    "CyclicLR": (sgd, lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 15, base_momentum=0.7, max_momentum=0.95)),
    "OneCycleLR": (sgd, lambda o: lr_scheduler.OneCycleLR(o, 0.1, STEPS + 1)),
    "OneCycleLR-betas": (adamw, lambda o: lr_scheduler.OneCycleLR(o, 0.05, STEPS + 1, three_phase=True)),
    "ReduceLROnPlateau": (sgd, lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=3, factor=0.5)),
    "SequentialLR": (adamw, sequential),
    "ChainedScheduler": (sgd, chained),
    "SWALR": (sgd, lambda o: SWALR(o, 0.01, anneal_epochs=20)),
}  # fmt: skip


def metric(step: int) -> float:
    """A validation loss that falls, stalls and falls again."""
    return 1 + math.cos(step / 10)


def test_every_scheduler_of_torch_has_a_case() -> None:
    exported = {
        name
        for name in lr_scheduler.__all__
        if isinstance(getattr(lr_scheduler, name), type) and name not in ("LRScheduler", "EPOCH_DEPRECATION_WARNING")
    }
    assert {case.partition("-")[0] for case in CASES} == exported | {"SWALR"}


@pytest.mark.parametrize("case", CASES)
def test_scheduled_update_is_torchs_and_compiles_once(case: str) -> None:
    make_optimizer, make_scheduler = CASES[case]
    values = initial_values(SHAPES)
    reference, mine = TorchSide(make_optimizer, values), TorchSide(make_optimizer, values)
    schedulers = [make_scheduler(side.optimizer) for side in (reference, mine)]
    ours = FunctionalSide(mine)
    assert isinstance(ours.functional, TableOptimizer)  # although the scheduler has wrapped the instance's step
    rates = set()
    with warnings.catch_warnings():
        # torch itself calls a part of a SequentialLR in the deprecated way
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*before.*")
        for step in range(STEPS):
            for side, scheduler in zip((reference, ours), schedulers, strict=True):
                side.step(noise(step, SHAPES))
                scheduler.step(metric(step)) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
            rates.add(float(mine.optimizer.param_groups[0]["lr"]))
    assert len(rates) > 1
    assert_close(ours.values(), reference.values(), TOLERANCE)
    assert ours.program._cache_size() == 1


def test_scheduler_resumes_from_its_state_dict() -> None:
    """Half the steps, both state dicts saved and loaded into new objects, the other half."""
    reference = TorchSide(adamw, initial_values(SHAPES))
    scheduler = lr_scheduler.OneCycleLR(reference.optimizer, 0.05, STEPS)
    mine = TorchSide(adamw, initial_values(SHAPES))
    ours, my_scheduler = FunctionalSide(mine), lr_scheduler.OneCycleLR(mine.optimizer, 0.05, STEPS)
    for step in range(20):
        reference.step(noise(step, SHAPES))
        ours.step(noise(step, SHAPES))
        scheduler.step()
        my_scheduler.step()
    resumed = TorchSide(adamw, ours.values())
    resumed_scheduler = lr_scheduler.OneCycleLR(resumed.optimizer, 0.05, STEPS)
    resumed_scheduler.load_state_dict(my_scheduler.state_dict())
    resumed.optimizer.load_state_dict(ours.functional.export_state(ours.state))
    again = FunctionalSide(resumed)
    for step in range(20, 40):
        reference.step(noise(step, SHAPES))
        again.step(noise(step, SHAPES))
        scheduler.step()
        resumed_scheduler.step()
    assert_close(again.values(), reference.values(), TOLERANCE)
    np.testing.assert_allclose(again.functional.hyper()[0], scheduler.get_last_lr()[0], rtol=1e-6)
