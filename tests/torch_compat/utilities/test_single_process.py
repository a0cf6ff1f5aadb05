"""Batches of loaders without workers: the same as torch's own iterator gives, or it gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, Subset, TensorDataset, random_split
from torch.utils.data._utils import collate

from torch_compat.utilities import single_process
from torch_compat.utilities.single_process import in_less_time

ROWS = 23
X, Y = torch.randn(ROWS, 3, 2, generator=torch.Generator().manual_seed(0)), torch.arange(ROWS)
DATA = TensorDataset(X, Y, X[:, 0, 0] > 0, X.bfloat16())


class Squares(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "square": torch.tensor(index**2)}


class Given(Sampler):
    """Gives the indices that it was given."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)


def both(make: Callable[[], DataLoader]) -> tuple[list[Any], list[Any]]:
    """Two passes by torch and by us, with what is left of the random stream at the end."""
    found = []
    for iterate in (iter, lambda loader: in_less_time(iter(loader))):
        torch.manual_seed(1)
        loader = make()
        passes = [batch for _ in range(2) for batch in iterate(loader)]
        found.append([*passes, torch.rand(1)])
    return found[0], found[1]


def taken_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that no row was asked for."""
    sizes: list[int] = []
    take = single_process._Rows.take

    def noting(self: Any, indices: Any) -> Any:
        batch = take(self, indices)
        if batch is not None:
            sizes.append(len(batch[0]))
        return batch

    monkeypatch.setattr(single_process._Rows, "take", noting)
    return sizes


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, 5),
        lambda: DataLoader(DATA, 5, shuffle=True, drop_last=True),
        lambda: DataLoader(DATA, 5, sampler=RandomSampler(DATA, replacement=True, num_samples=12)),
        lambda: DataLoader(DATA, 5, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: DataLoader(random_split(DATA, [0.5, 0.5])[1], 5),
        lambda: DataLoader(Subset(Subset(DATA, range(3, 20)), torch.tensor([4, 9, 1])), 2),  # pyright: ignore[reportArgumentType]
        lambda: DataLoader(DATA, batch_sampler=Given([[3, 1, 4], [1]])),
        lambda: DataLoader(DATA, 3, sampler=Given(torch.tensor([2, 7, 1, 8]))),
    ],
)
def test_rows_of_tensors(make: Callable[[], DataLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = taken_at_once(monkeypatch)
    torchs, ours = both(make)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0)
    assert [type(batch) for batch in ours] == [type(batch) for batch in torchs]
    assert sizes == [len(batch[0]) for batch in torchs[:-1]]  # as they were expected to be loaded


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, 4, sampler=Given([-1, 5, -3])),
        lambda: DataLoader(TensorDataset(X.transpose(1, 2), Y), 4),
        lambda: DataLoader(DATA, 4, collate_fn=len),
        lambda: DataLoader(DATA, batch_size=None),
        lambda: DataLoader(DATA, batch_sampler=Given([(3, 1), (2,)])),
        lambda: DataLoader(Squares(), 4),
    ],
)
def test_what_torch_loads(make: Callable[[], DataLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = taken_at_once(monkeypatch)
    torchs, ours = both(make)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=0)
    assert not sizes


def test_errors_are_torchs() -> None:
    for indices in ([1, ROWS + 5], [1.5]):
        with pytest.raises(Exception) as torchs:
            list(DataLoader(DATA, 2, sampler=Given(indices)))
        with pytest.raises(type(torchs.value)) as ours:
            list(in_less_time(iter(DataLoader(DATA, 2, sampler=Given(indices)))))
        assert str(ours.value) == str(torchs.value)


def test_tensors_may_change_between_batches() -> None:
    data = TensorDataset(X.clone())
    batches = in_less_time(iter(DataLoader(data, 2)))
    next(batches)
    data.tensors[0][2] = 7.0
    assert (next(batches)[0][0] == 7).all()
    data.tensors = (Y.to_sparse(), X)  # which torch cannot batch in the same way
    torch.testing.assert_close(next(batches)[1], X[4:6])
    data.tensors = (Y,)
    torch.testing.assert_close(next(batches)[0], Y[6:8])


def test_subsets_may_change_between_batches() -> None:
    subset = Subset(DATA, [1, 2, 3, 4])
    batches = in_less_time(iter(DataLoader(subset, 2)))
    next(batches)
    subset.indices = [1, 2, 9, 8]
    assert next(batches)[1].tolist() == [9, 8]


def test_replaced_methods_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, lambda rows, collate_fn_map: len(rows))
    assert list(in_less_time(iter(DataLoader(DATA, 20)))) == [[20] * 4, [3] * 4]
    monkeypatch.undo()
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: index)
    assert [batch.tolist() for batch in in_less_time(iter(DataLoader(DATA, 20)))] == [list(range(20)), [20, 21, 22]]


def test_profilers_see_the_loader() -> None:
    batches = in_less_time(iter(DataLoader(DATA, 5)))
    next(batches)
    with torch.autograd.profiler.profile() as profile:
        torch.testing.assert_close(next(batches)[1], Y[5:10])
    assert any("DataLoader" in event.name for event in profile.function_events or ())
    torch.testing.assert_close(next(batches)[1], Y[10:15])


def test_others_are_left_alone() -> None:
    for batches in (iter([1]), iter(DataLoader(DATA, 5, num_workers=1))):
        assert in_less_time(batches) is batches
