"""Random streams of the host, as they are saved: the global generators, and those that the parts of a data loader hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from torch_compat.step.values.generators import set_state, state_of
from torch_compat.utilities.seed import random_states, restore_random_states

_PARTS = ("dataset", "datasets", "sampler", "batch_sampler", "batches", "stream", "items", "_batches")
"""Where a loader and its samplers keep what they are made of, torch's and ours."""


def streams() -> dict[str, Any]:
    """The states of torch's, numpy's and Python's global generators."""
    states = random_states(include_cuda=False)
    return {**states, "numpy": _as_saved(states["numpy"])}


def set_streams(states: dict[str, Any]) -> None:
    """Continue the global generators there."""
    restore_random_states({**states, "numpy": _as_numpy(states["numpy"])})


def generator_states(loader: Any) -> list[Any]:
    """The states of the generators that the loader, its samplers and its dataset have as attributes, in a fixed order."""
    return [_state(generator) for generator in _generators(loader)]


def set_generator_states(loader: Any, states: list[Any]) -> bool:
    """Continue the loader's generators there; False, and nothing is changed, where these are not the loader's."""
    generators = list(_generators(loader))
    if [type(_state(generator)) for generator in generators] != [type(state) for state in states]:
        return False
    for generator, state in zip(generators, states, strict=True):
        _set_state(generator, state)
    return True


def _generators(loader: Any) -> Iterator[Any]:
    seen: set[int] = set()
    remaining = [loader]
    while remaining:
        part = remaining.pop()
        if id(part) in seen or not hasattr(part, "__dict__"):
            continue
        seen.add(id(part))
        for name, value in vars(part).items():
            if isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
                if id(value) not in seen:
                    seen.add(id(value))
                    yield value
            elif name in _PARTS:
                remaining += value if isinstance(value, (list, tuple)) and name == "datasets" else [value]


def _state(generator: Any) -> Any:
    return list(_as_saved(generator.get_state())) if isinstance(generator, np.random.RandomState) else state_of(generator)


def _as_saved(state: Any) -> tuple[Any, ...]:
    """A state of numpy's legacy generators, with a tensor for its array: torch's files of tensors alone are read safely."""
    name, key, *rest = state
    return name, torch.from_numpy(key.astype(np.int64)), *rest


def _as_numpy(state: Any) -> tuple[Any, ...]:
    name, key, *rest = state
    return name, np.asarray(key).astype(np.uint32), *rest


def _set_state(generator: Any, state: Any) -> None:
    set_state(generator, _as_numpy(state) if isinstance(generator, np.random.RandomState) else state)
