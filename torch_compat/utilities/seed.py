"""Seeding of Python's, numpy's and torch's generators (``lightning.pytorch.utilities.seed``)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from torch_compat.utilities.rank_zero import rank_prefixed_message, rank_zero_info, rank_zero_only, rank_zero_warn

SEED_VARIABLE = "PL_GLOBAL_SEED"
WORKERS_VARIABLE = "PL_SEED_WORKERS"
MIN_SEED = 0
MAX_SEED = 2**32 - 1


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seeds ``random``, ``numpy.random`` and torch, and remembers the seed for child processes.

    On a mesh the compiled step's own random key is derived from torch's generator, so this seeds it too.

    Args:
        seed: from 0 to 2**32 - 1. None: the environment variable ``PL_GLOBAL_SEED``, else 0, with a warning if ``verbose``.
        workers: whether the Trainer gives each DataLoader worker its own seed derived from this one.
        verbose: print the seed.

    Returns:
        The seed.

    Raises:
        ValueError: the seed is no integer or out of bounds.
    """
    if seed is None:
        seed = _seed_from_environment(verbose)
    try:
        seed = int(seed)
    except (TypeError, ValueError):
        raise ValueError(f"Invalid seed specified: {seed!r}; expected an integer from {MIN_SEED} to {MAX_SEED}.") from None
    if not MIN_SEED <= seed <= MAX_SEED:
        raise ValueError(f"{seed} is not in bounds, numpy accepts from {MIN_SEED} to {MAX_SEED}")
    if verbose:
        rank_zero_info(rank_prefixed_message(f"Seed set to {seed}", _process_index() or None))
    os.environ[SEED_VARIABLE] = str(seed)
    os.environ[WORKERS_VARIABLE] = str(int(workers))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def _seed_from_environment(verbose: bool) -> int:
    text = os.environ.get(SEED_VARIABLE)
    if text is None:
        if verbose:
            rank_zero_warn("No seed found, seed set to 0")
        return 0
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"Invalid seed specified via {SEED_VARIABLE}: {text!r}; expected an integer.") from None


def reset_seed() -> None:
    """Seeds again as the last :func:`seed_everything` did; nothing if there was none."""
    seed = os.environ.get(SEED_VARIABLE)
    if seed is not None:
        seed_everything(int(seed), workers=bool(int(os.environ.get(WORKERS_VARIABLE, "0"))), verbose=False)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seeds the generators of a DataLoader worker: differently in each worker, each process and each epoch.

    Args:
        worker_id: as the DataLoader gives it.
        rank: index of the process that the worker belongs to; ``rank_zero_only.rank`` by default.
    """
    process = _process_index() if rank is None else rank
    # The worker's own seed is the loader's seed of this epoch plus the worker's id.
    base_seed = torch.initial_seed() - worker_id
    for_torch, high, low = _mixed_seeds((base_seed << 32) | (worker_id << 16) | process, 3)
    torch.manual_seed(for_torch)
    random.seed((high << 32) | low)
    np.random.seed(np.random.SeedSequence([base_seed, worker_id, process]).generate_state(4))


def _mixed_seeds(number: int, count: int) -> list[int]:
    """64-bit seeds from one number: MurmurHash3's finalizer, then Knuth's linear congruential generator.

    Stock's workers are seeded in this way, so random augmentations in workers draw the same.
    """
    bits = (1 << 64) - 1
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        number = ((number ^ (number >> 33)) * factor) & bits
    number ^= number >> 33
    seeds = []
    for _ in range(count):
        number = (number * 6364136223846793005 + 1) & bits
        seeds.append(number)
    return seeds


def worker_seeding(loader: Any) -> Callable[[int], None] | None:
    """The ``worker_init_fn`` that ``seed_everything(workers=True)`` asks for; None where it did not, or there is one."""
    if not loader.num_workers or loader.worker_init_fn is not None or not int(os.environ.get(WORKERS_VARIABLE) or 0):
        return None
    return partial(pl_worker_init_function, rank=_process_index())


def _process_index() -> int:
    return getattr(rank_zero_only, "rank", None) or 0


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Generator[None, None, None]:
    """Restore the states of Python's, numpy's and torch's generators after the block; as in stock, not where it raises.

    Args:
        include_cuda: whether torch's CUDA generators are included.
    """
    states = random_states(include_cuda)
    yield
    restore_random_states(states)


def random_states(include_cuda: bool) -> dict[str, Any]:
    """States of torch's, numpy's and Python's generators."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if include_cuda and torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Give the generators states that :func:`random_states` gave."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def _collect_rng_states(include_cuda: bool = True) -> dict[str, Any]:
    """States of the generators under the keys of ``lightning.fabric.utilities.seed``."""
    states = random_states(include_cuda)
    return {**{name: states[name] for name in ("torch", "python", "numpy")}, "torch.cuda": states.get("cuda", [])}


def _set_rng_states(rng_state_dict: dict[str, Any]) -> None:
    """Give the generators what :func:`_collect_rng_states` found; lists from a safely loaded checkpoint do too."""
    version, state, gauss = rng_state_dict["python"]
    states = {**rng_state_dict, "python": (version, tuple(state), gauss)}
    cuda = states.pop("torch.cuda", None)
    restore_random_states({**states, "cuda": cuda} if cuda else states)
