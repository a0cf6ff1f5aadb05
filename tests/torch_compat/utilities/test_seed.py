"""``seed_everything`` and ``isolate_rng``."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from torch_compat.utilities.seed import isolate_rng, reset_seed, seed_everything


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with isolate_rng():
        yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_every_generator_is_seeded() -> None:
    assert seed_everything(5, workers=True) == 5
    first = draws()
    assert os.environ["PL_GLOBAL_SEED"] == "5"
    assert os.environ["PL_SEED_WORKERS"] == "1"
    seed_everything(5, verbose=False)
    assert draws() == first
    reset_seed()
    assert draws() == first


def test_the_environment_gives_the_seed() -> None:
    os.environ["PL_GLOBAL_SEED"] = "7"
    assert seed_everything() == 7
    os.environ["PL_GLOBAL_SEED"] = "seven"
    with pytest.raises(ValueError, match="PL_GLOBAL_SEED='seven'"):
        seed_everything()


def test_without_a_seed() -> None:
    with pytest.warns(UserWarning, match="No seed found, seed set to 0"):
        assert seed_everything() == 0


@pytest.mark.parametrize(
    ("seed", "message"), [(-1, "-1 is not in bounds"), (2**32, "not in bounds"), ("x", "'x'; expected an integer")]
)
def test_wrong_seeds(seed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seed_everything(seed)


def test_isolated_draws_leave_no_trace() -> None:
    seed_everything(1, verbose=False)
    first = draws()
    seed_everything(1, verbose=False)
    with pytest.raises(RuntimeError), isolate_rng():
        draws()
        raise RuntimeError
    assert draws() == first
