"""Re-batched loaders against what a stock ``DataLoader`` of the global batch size gives."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from torch_compat.trainer.data.dataloaders import prepare_dataloader
from torch_compat.trainer.data.samplers import ExpandedSampler
from torch_compat.utilities.exceptions import MisconfigurationException

N = 43
DATA = TensorDataset(torch.arange(N), torch.arange(N) * 10)


def firsts(loader: Any) -> list[list[int]]:
    """The sample numbers in each batch."""
    return [batch[0].tolist() for batch in loader]


class Wire:
    """Runs several processes' loaders one after the other: process 0's broadcasts are recorded, the others hear them."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def source(self, value: Any) -> Any:
        self.said.append(value)
        return value

    def listener(self) -> Callable[[Any], Any]:
        heard = iter(self.said)
        return lambda _: next(heard)


def on_processes(make: Callable[[], Any], replicas: int, processes: int, **options: Any) -> list[list[int]]:
    """The global batches that ``processes`` processes load together, each under its own random state."""
    wire = Wire()
    parts = []
    for p in range(processes):
        torch.manual_seed(0 if p == 0 else 1000 + p)
        random.seed(p)
        broadcast = wire.source if p == 0 else wire.listener()
        loader = prepare_dataloader(make(), replicas, p, processes, broadcast=broadcast, **options)
        parts.append(firsts(loader))
    return [[i for part in step for i in part] for step in zip(*parts, strict=True)]


# ------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_one_process_equals_a_loader_of_the_global_batch_size(shuffle: bool, drop_last: bool) -> None:
    torch.manual_seed(1)
    expected = [firsts(DataLoader(DATA, 8, shuffle=shuffle, drop_last=drop_last)) for _ in range(2)]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    loader = DataLoader(DATA, 2, shuffle=shuffle, drop_last=drop_last)
    prepared = prepare_dataloader(loader, 4)
    assert [firsts(prepared), firsts(prepared)] == expected
    assert torch.equal(torch.get_rng_state(), state)  # no more and no fewer draws than stock
    assert len(prepared) == len(expected[0])
    assert prepared.batch_size == 8
    assert len(loader) == len(DataLoader(DATA, 2, drop_last=drop_last))  # the user's own loader is as it was


def test_one_replica_returns_the_very_loader() -> None:
    loader = DataLoader(DATA, 2, shuffle=True)
    assert prepare_dataloader(loader, 1) is loader


def test_own_generator_is_drawn_from_as_stock_does() -> None:
    expected = firsts(DataLoader(DATA, 8, shuffle=True, generator=torch.Generator().manual_seed(5)))
    got = firsts(prepare_dataloader(DataLoader(DATA, 2, shuffle=True, generator=torch.Generator().manual_seed(5)), 4))
    assert got == expected


class EvensThenOdds(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([*range(0, N, 2), *range(1, N, 2)])

    def __len__(self) -> int:
        return N


class Pairs:
    """A batch sampler that is none of torch's classes; its batches have 1 to 3 samples."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self.epoch], [1, 2], [3, 4, 5], [6], [7, 8]])

    def __len__(self) -> int:
        return 5


def test_custom_sampler() -> None:
    got = firsts(prepare_dataloader(DataLoader(DATA, 2, sampler=EvensThenOdds()), 4))
    assert got == firsts(DataLoader(DATA, 8, sampler=EvensThenOdds()))


def test_custom_batch_sampler_is_joined() -> None:
    prepared = prepare_dataloader(DataLoader(DATA, batch_sampler=Pairs()), 2)
    assert firsts(prepared) == [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    assert len(prepared) == 3
    prepared.batch_sampler.set_epoch(9)
    assert firsts(prepared)[0] == [9, 1, 2]


def test_custom_batch_sampler_that_drops_its_last_batch_drops_an_incomplete_group() -> None:
    class Bucketed(BatchSampler):
        pass

    loader = DataLoader(DATA, batch_sampler=Bucketed(SequentialSampler(DATA), 4, drop_last=True))  # 10 batches
    prepared = prepare_dataloader(loader, 4)
    assert firsts(prepared) == [list(range(16)), list(range(16, 32))]
    assert len(prepared) == 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_distributed_sampler_is_expanded_to_the_global_stream(shuffle: bool) -> None:
    loader = DataLoader(DATA, 2, sampler=DistributedSampler(DATA, num_replicas=4, rank=1, shuffle=shuffle, seed=3))
    prepared = prepare_dataloader(loader, 4)
    prepared.sampler.set_epoch(2)
    alone = DistributedSampler(DATA, num_replicas=1, rank=0, shuffle=shuffle, seed=3)
    alone.set_epoch(2)
    assert firsts(prepared) == firsts(DataLoader(DATA, 8, sampler=alone))
    assert loader.sampler.epoch == 2  # pyright: ignore[reportAttributeAccessIssue]  # set_epoch on either reaches both
    assert len(prepared) == 6


def test_distributed_sampler_within_a_batch_sampler_is_expanded() -> None:
    class Bucketed(BatchSampler):
        pass

    inner = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=False)
    prepared = prepare_dataloader(DataLoader(DATA, batch_sampler=Bucketed(inner, 3, False)), 2)
    assert firsts(prepared)[0] == list(range(6))


def test_distributed_sampler_for_another_number_of_ranks_is_the_users_own_split() -> None:
    loader = DataLoader(DATA, 2, sampler=DistributedSampler(DATA, num_replicas=10, rank=1, shuffle=False))
    assert firsts(prepare_dataloader(loader, 2)) == [[1, 11, 21, 31], [41]]


def test_distributed_sampler_subclass_is_dealt_round_robin() -> None:
    class Reversed(DistributedSampler):
        def __iter__(self) -> Iterator[int]:
            return iter(list(range(N - 1, -1, -1))[self.rank : self.total_size : self.num_replicas])

        def __len__(self) -> int:
            return len(list(iter(self)))

    sampler = Reversed(TensorDataset(torch.arange(42)), num_replicas=2, rank=1)
    assert list(ExpandedSampler(sampler))[:4] == [42, 41, 40, 39]


def test_predict_keeps_the_last_batch_and_records_indices() -> None:
    prepared = prepare_dataloader(DataLoader(DATA, 2, drop_last=True), 4, mode="predict")
    assert [i for batch in firsts(prepared) for i in batch] == list(range(N))
    assert prepared.batch_sampler.seen_batch_indices[-1] == [40, 41, 42]
    assert len(prepared) == 6


def test_without_distributed_sampler_batches_stay_as_they_are() -> None:
    loader = DataLoader(DATA, 2)
    assert prepare_dataloader(loader, 4, use_distributed_sampler=False) is loader


def test_overfit_takes_samples_in_order() -> None:
    with pytest.warns(UserWarning, match="requested to overfit"):
        prepared = prepare_dataloader(DataLoader(DATA, 2, shuffle=True), 4, overfit=True)
    assert firsts(prepared) == firsts(DataLoader(DATA, 8))
    assert isinstance(prepared.sampler, SequentialSampler)


def test_overfit_of_a_batch_sampler_without_sampler_is_refused() -> None:
    with pytest.warns(UserWarning), pytest.raises(MisconfigurationException, match="`Pairs` has no attribute `sampler`"):
        loader = DataLoader(DATA, sampler=EvensThenOdds(), batch_size=1)
        loader.__dict__["batch_sampler"] = Pairs()
        prepare_dataloader(loader, 2, overfit=True)


def test_other_iterables_pass_through() -> None:
    batches = [torch.zeros(3)]
    assert prepare_dataloader(batches, 4) is batches


def test_a_subclass_with_another_constructor_is_copied_not_constructed() -> None:
    class Odd(DataLoader):
        def __init__(self, path: str) -> None:
            self.path = path
            super().__init__(DATA, batch_size=2, collate_fn=lambda rows: [torch.stack([row[0] for row in rows]), path])

    prepared = prepare_dataloader(Odd("p"), 4)
    assert isinstance(prepared, Odd)
    assert prepared.path == "p"
    assert firsts(prepared) == firsts(DataLoader(DATA, 8))


def test_a_subclass_that_iterates_its_parent_is_re_batched() -> None:
    class Doubled(DataLoader):
        def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
            for batch in super().__iter__():
                yield [2 * batch[0]]

    assert firsts(prepare_dataloader(Doubled(DATA, 2), 4))[0] == [0, 2, 4, 6, 8, 10, 12, 14]


def test_a_subclass_that_ignores_its_sampler_is_refused_by_name() -> None:
    class Fast(DataLoader):
        def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
            yield [torch.zeros(2)]

    with pytest.raises(MisconfigurationException, match=r"`.*Fast.__iter__` does not take its indices"):
        firsts(prepare_dataloader(Fast(DATA, 2), 4))
    # Where its batches are right as they are, it may.
    assert firsts(prepare_dataloader(Fast(DATA, 2), 1, mode="predict")) == [[0, 0]]
    assert firsts(prepare_dataloader(Fast(DATA, 2, num_workers=1), 4, use_distributed_sampler=False)) == [[0, 0]]
    assert firsts(prepare_dataloader(Fast(DATA, 2, num_workers=1), 1)) == [[0, 0]]


class Stream(IterableDataset):
    def __init__(self, start: int, n: int) -> None:
        self.start, self.n = start, n

    def __iter__(self) -> Iterator[tuple[int]]:
        return iter([(i,) for i in range(self.start, self.start + self.n)])


def test_iterable_dataset_gives_larger_batches() -> None:
    prepared = prepare_dataloader(DataLoader(Stream(0, 10), 2, drop_last=True), 2)
    assert firsts(prepared) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_iterable_dataset_without_automatic_batching_passes_through() -> None:
    loader = DataLoader(Stream(0, 3), batch_size=None)
    assert prepare_dataloader(loader, 4) is loader


# ---------------------------------------------------------------------------------------------------- several processes


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: DataLoader(DATA, 2), id="sequential"),
        pytest.param(lambda: DataLoader(DATA, 2, shuffle=True), id="shuffled"),
        pytest.param(lambda: DataLoader(DATA, 2, shuffle=True, drop_last=True), id="drop_last"),
        pytest.param(
            lambda: DataLoader(DATA, 2, sampler=RandomSampler(DATA, replacement=True, num_samples=50)), id="replacement"
        ),
        pytest.param(lambda: DataLoader(DATA, 2, sampler=SubsetRandomSampler(range(5, 40))), id="subset"),
        pytest.param(lambda: DataLoader(DATA, 2, sampler=WeightedRandomSampler(range(1, N), 30)), id="weighted"),
        pytest.param(lambda: DataLoader(DATA, 2, sampler=Shuffler()), id="random module"),
        pytest.param(lambda: DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 4, 2, seed=1)), id="distributed"),
        pytest.param(lambda: DataLoader(DATA, batch_sampler=Pairs()), id="batch sampler"),
    ],
)
def test_global_batches_are_the_same_on_any_process_count(make: Callable[[], Any], processes: int) -> None:
    torch.manual_seed(0)
    random.seed(0)
    expected = firsts(prepare_dataloader(make(), 4))
    assert on_processes(make, 4, processes) == expected


class Shuffler(Sampler[int]):
    """Draws from Python's generator, which nobody can synchronise from outside."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(N))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return N


def test_a_process_without_rows_gets_an_empty_batch_of_the_right_structure() -> None:
    data = TensorDataset(torch.arange(9), torch.arange(18).reshape(9, 2))
    loader = prepare_dataloader(DataLoader(data, 1), 8, 1, 2, broadcast=lambda value: 2)
    batches = list(loader)
    assert batches[0][0].tolist() == [4, 5, 6, 7]
    assert [leaf.shape for leaf in batches[1]] == [(0,), (0, 2)]


def test_each_process_loads_only_its_own_rows() -> None:
    loaded = []

    class Counting(Dataset):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, i: int) -> int:
            loaded.append(i)
            return i

    list(prepare_dataloader(DataLoader(Counting(), 2), 4, 1, 2, broadcast=lambda value: value))
    assert loaded == [4, 5, 6, 7, 12, 13, 14, 15]


def test_predict_records_this_processes_indices() -> None:
    loader = prepare_dataloader(DataLoader(DATA, 2), 4, 1, 2, mode="predict", broadcast=lambda value: value)
    list(loader)
    assert loader.batch_sampler.seen_batch_indices[0] == [4, 5, 6, 7]
    assert loader.batch_sampler.seen_batch_indices[-1] == [42]


def test_datasets_of_different_lengths_are_refused() -> None:
    loader = prepare_dataloader(DataLoader(DATA, 2), 4, 1, 2, broadcast=lambda value: 5)
    with pytest.raises(RuntimeError, match="6 batches of samples on this process and 5 on process 0"):
        list(loader)


def test_iterable_dataset_on_several_processes_draws_its_own_stream() -> None:
    assert firsts(prepare_dataloader(DataLoader(Stream(100, 8), 2), 4, 1, 2)) == [[100, 101, 102, 103], [104, 105, 106, 107]]


def test_whole_batches_go_to_the_processes_in_turn() -> None:
    def make() -> DataLoader:
        batches = [[torch.arange(i, i + 2)] for i in range(0, 10, 2)]
        return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]

    assert on_processes(make, 4, 2) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# -------------------------------------------------------------------------------------------------------------- workers


class Squares(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[int]:
        return (i * i,)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_deliver_while_jax_runs_and_without_a_fork_warning(persistent: bool) -> None:
    import jax.numpy as jnp

    running = jnp.ones((64, 64)) @ jnp.ones((64, 64))
    loader = DataLoader(Squares(), 2, num_workers=2, persistent_workers=persistent, worker_init_fn=lambda i: None, timeout=300)
    prepared = prepare_dataloader(loader, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "This DataLoader will create 2 worker processes")  # on a machine of one core
        for _ in range(2):
            assert [i for batch in firsts(prepared) for i in batch] == [i * i for i in range(12)]
    assert prepared.multiprocessing_context.get_start_method() == "fork"
    assert loader.multiprocessing_context is None
    assert float(running[0, 0]) == 64.0


class UsesJax(Squares):
    def __getitem__(self, i: int) -> Any:
        import jax.numpy as jnp

        return (int(jnp.arange(3).sum()),)


def test_a_worker_that_computes_with_jax_says_so_instead_of_hanging() -> None:
    import jax.numpy as jnp

    assert int(jnp.arange(3).sum()) == 3  # started, and compiled
    prepared = prepare_dataloader(DataLoader(UsesJax(), 2, num_workers=1, timeout=300), 2)
    batches = iter(prepared)
    with pytest.raises(RuntimeError, match="DataLoader worker computes with JAX"):
        next(batches)
    batches._shutdown_workers()  # the exception's traceback would keep them


def test_a_context_given_by_the_user_is_kept() -> None:
    prepared = prepare_dataloader(DataLoader(Squares(), 2, num_workers=1, multiprocessing_context="spawn"), 2)
    assert prepared.multiprocessing_context.get_start_method() == "spawn"


@pytest.mark.parametrize("ready", [DataLoader(Squares(), batch_size=None), [torch.zeros(4)]])
def test_ready_batches_are_not_enlarged_and_a_warning_says_so(ready: Any) -> None:
    with pytest.warns(UserWarning, match="the 2 devices of a process share each of them"):
        prepare_dataloader(ready, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_dataloader(ready, 1)
        prepare_dataloader(ready, 2, use_distributed_sampler=False)
        prepare_dataloader(ready, 2, mode="validate")
        prepare_dataloader(DataLoader(Squares(), 2), 2)
