"""The four modes of CombinedLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from torch_compat.trainer.data.workers import WorkerContext
from torch_compat.utilities.combined_loader import CombinedLoader

INF = float("inf")


class Unsized:
    """An iterable of 1, 2 that does not know its length."""

    def __iter__(self) -> Iterator[int]:
        yield from (1, 2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [({"a": 1, "b": "x"}, 0, 0), ({"a": 2, "b": "y"}, 1, 0)]),
        ("max_size", [({"a": 1, "b": "x"}, 0, 0), ({"a": 2, "b": "y"}, 1, 0), ({"a": 3, "b": None}, 2, 0)]),
        ("max_size_cycle", [({"a": 1, "b": "x"}, 0, 0), ({"a": 2, "b": "y"}, 1, 0), ({"a": 3, "b": "x"}, 2, 0)]),
        ("sequential", [(1, 0, 0), (2, 1, 0), (3, 2, 0), ("x", 0, 1), ("y", 1, 1)]),
    ],
)
def test_modes(mode: Any, expected: list[Any]) -> None:
    loader = CombinedLoader({"a": [1, 2, 3], "b": ["x", "y"]}, mode)
    for _ in range(2):
        assert list(loader) == expected
        assert len(loader) == len(expected)


@pytest.mark.parametrize(
    ("iterables", "mode", "expected"),
    [
        ([[1, 2], [[3], [4]]], "min_size", [[1, [3, 4]]]),
        ([1, 2], "min_size", [1, 2]),
        ({}, "min_size", []),
        ({}, "max_size_cycle", []),
        ([range(0), [1]], "min_size", []),
        ([range(0), [1]], "max_size", [[None, 1]]),
        (range(2), "min_size", [0, 1]),
        ([range(3), (range(1), {"q": range(2)})], "max_size_cycle", [[0, (0, {"q": 0})], [1, (0, {"q": 1})], [2, (0, {"q": 0})]]),
        ([Unsized(), range(3)], "max_size_cycle", [[1, 0], [2, 1], [1, 2]]),
    ],
)
def test_structures(iterables: Any, mode: Any, expected: list[Any]) -> None:
    assert [batch for batch, _, _ in CombinedLoader(iterables, mode)] == expected


@pytest.mark.parametrize(
    ("mode", "limits", "batches", "length"),
    [
        ("sequential", [1, 1], [(0, 0, 0), (0, 0, 1)], 2),
        ("sequential", 2, [(0, 0, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1)], 4),
        ("sequential", [0, INF], [(0, 0, 1), (1, 1, 1)], 2),
        ("max_size", [1, 1], None, 1),
        ("min_size", [INF, 2], None, 2),
    ],
)
def test_limits(mode: Any, limits: Any, batches: list[Any] | None, length: int) -> None:
    loader = CombinedLoader([range(3), range(2)], mode)
    loader.limits = limits
    iter(loader)
    assert len(loader) == length
    if batches is not None:
        assert list(loader) == batches


def test_sequential_makes_an_iterator_when_its_turn_comes() -> None:
    made = []

    class Noisy:
        def __init__(self, name: str) -> None:
            self.name = name

        def __iter__(self) -> Iterator[int]:
            made.append(self.name)
            return iter(range(2))

    loader = CombinedLoader([Noisy("a"), Noisy("b"), Noisy("c")], "sequential")
    loader.limits = [1, 0, 1]
    iter(loader)
    assert made == ["a"]
    assert list(loader)[-1] == (0, 0, 2)
    assert made == ["a", "a", "b", "c"]


def test_attributes_of_loaders() -> None:
    data = DataLoader(range(4), batch_size=2)
    loader = CombinedLoader({"a": data, "b": range(3)})
    assert isinstance(loader.sampler["a"], SequentialSampler)
    assert isinstance(loader.batch_sampler["a"], BatchSampler)
    assert loader.sampler["b"] is None
    assert loader.flattened == [data, range(3)]
    loader.flattened = [range(1), range(2)]
    assert loader.iterables == {"a": range(1), "b": range(2)}


def test_workers_stop_at_reset() -> None:
    data = DataLoader(range(4), num_workers=1, persistent_workers=True, multiprocessing_context=WorkerContext())
    loader = CombinedLoader([data])
    assert next(iter(loader))[1:] == (0, 0)
    workers = data._iterator._workers
    loader.reset()
    assert data._iterator is None
    assert not any(worker.is_alive() for worker in workers)


def test_state_of_stateful_loaders() -> None:
    class Stateful:
        def __init__(self, position: int) -> None:
            self.position = position

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    stateful = Stateful(7)
    loader = CombinedLoader([stateful, range(3)])
    assert loader._state_dicts() == [{"position": 7}]
    loader._load_state_dicts([{"position": 2}])
    assert stateful.position == 2
    loader._load_state_dicts([])
    with pytest.raises(RuntimeError, match="has 1 stateful loaders, but found 2 states"):
        loader._load_state_dicts([{}, {}])


def test_errors() -> None:
    with pytest.raises(ValueError, match="Unsupported mode 'foo', please select one of"):
        CombinedLoader([], "foo")
    loader = CombinedLoader([range(3), range(2)])
    for use in (lambda: len(loader), lambda: next(loader)):
        with pytest.raises(RuntimeError, match=r"Please call `iter\(combined_loader\)` first"):
            use()
    with pytest.raises(ValueError, match=r"number of limits \(1\) and number of iterables \(2\)"):
        loader.limits = [1]
    with pytest.raises(ValueError, match=r"flattened length \(1\) and existing length \(2\)"):
        loader.flattened = [range(1)]
    unsized = CombinedLoader([Unsized(), range(3)], "sequential")
    iter(unsized)
    with pytest.raises(TypeError, match="has no length"):
        len(unsized)
