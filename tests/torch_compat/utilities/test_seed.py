"""``seed_everything`` and ``isolate_rng``."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torch_compat.trainer.data.dataloaders import prepare_dataloader
from torch_compat.trainer.data.workers import WorkerContext
from torch_compat.utilities.seed import isolate_rng, pl_worker_init_function, reset_seed, seed_everything, worker_seeding


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
    with pytest.raises(ValueError, match="Invalid seed specified via PL_GLOBAL_SEED: 'seven'"):
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


class Draws(Dataset[Any]):
    """The draws of each generator of the worker."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(draws(), dtype=torch.float64)


def worker_draws(rank: int) -> torch.Tensor:
    """Draws of two workers, as ``(workers, generators)``, in a process of that rank."""
    seed_everything(3, workers=True, verbose=False)
    loader = DataLoader(Draws(), num_workers=2, batch_size=1, multiprocessing_context=WorkerContext())
    loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
    return torch.cat(list(loader))


def test_workers_of_every_process_draw_differently_and_again_the_same() -> None:
    first, second, again = worker_draws(0), worker_draws(1), worker_draws(0)
    assert torch.equal(first, again)
    assert len(torch.cat([first, second]).unique()) == first.numel() + second.numel()


def test_workers_are_seeded_when_that_was_asked_for_and_nobody_else_does() -> None:
    loader = DataLoader(Draws(), num_workers=1)
    seed_everything(3, verbose=False)
    assert worker_seeding(loader) is None
    seed_everything(3, workers=True, verbose=False)
    assert worker_seeding(loader) is not None
    assert worker_seeding(DataLoader(Draws())) is None
    assert worker_seeding(DataLoader(Draws(), num_workers=1, worker_init_fn=print)) is None
    assert prepare_dataloader(loader, 1).worker_init_fn is not None
    assert loader.worker_init_fn is None


def test_isolated_draws_leave_no_trace() -> None:
    seed_everything(1, verbose=False)
    first = draws()
    seed_everything(1, verbose=False)
    with isolate_rng():
        draws()
    assert draws() == first


def test_a_block_that_raises_leaves_the_generators_where_it_ended() -> None:
    """As stock's: a sanity check whose step raises, for one."""
    seed_everything(1, verbose=False)
    draws()
    second = draws()
    seed_everything(1, verbose=False)
    with pytest.raises(RuntimeError), isolate_rng():
        draws()
        raise RuntimeError
    assert draws() == second
