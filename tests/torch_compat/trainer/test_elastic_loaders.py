"""An elastic launch keeps the global batch on any number of processes, and refuses loaders that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from torch_compat.trainer.data.dataloaders import prepare_dataloader
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.mesh.data import BatchLayout


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def global_batches(processes: int, replicas: int, **options: Any) -> list[list[int]]:
    """The batches of all processes, put together."""
    parts = []
    for process in range(processes):
        torch.manual_seed(1)
        loader = DataLoader(range(50), batch_size=2, shuffle=True, **options)  # pyright: ignore[reportArgumentType]
        prepared = prepare_dataloader(loader, replicas, process, processes, broadcast=lambda value: value)
        parts.append([list(batch) for batch in prepared.batch_sampler])
    return [[row for part in rows for row in part] for rows in zip(*parts, strict=True)]


def test_the_global_batch_is_that_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = global_batches(1, 6)
    assert [len(batch) for batch in whole] == [12, 12, 12, 12, 2]
    monkeypatch.setenv("XLATRAIN_ELASTIC", "3")
    assert global_batches(1, 2) == whole  # two replicas on each of three processes, of which one is left


@pytest.mark.parametrize(
    ("loader", "options", "said"),
    [
        ([1, 2], {}, "`list` is no DataLoader"),
        (DataLoader(Stream(), batch_size=2), {}, "its own stream of `Stream`, an IterableDataset"),
        (DataLoader(range(8), batch_size=None), {}, r"a DataLoader\(batch_size=None\) gives ready batches"),  # pyright: ignore[reportArgumentType]
        (DataLoader(range(8), batch_size=2), {"use_distributed_sampler": False}, "with use_distributed_sampler=False"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_loader_whose_batches_would_be_others_is_refused(
    loader: Any, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLATRAIN_ELASTIC", "3")
    with pytest.raises(MisconfigurationException, match=f"launch --elastic` keeps the global batch.*{said}.*--max-restarts"):
        prepare_dataloader(loader, 2, **options)


def test_a_mesh_whose_other_axes_reach_over_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_ELASTIC", "3")
    loader = DataLoader(range(8), batch_size=2)  # pyright: ignore[reportArgumentType]
    layout = BatchLayout.contiguous(1, 0, 1)
    object.__setattr__(layout, "shards_of", ((0,), (0,)))
    with pytest.raises(
        MisconfigurationException, match="2 processes hold 1 data-parallel replicas, so 3 processes would hold no whole"
    ):
        prepare_dataloader(loader, 1, layout=layout, broadcast=lambda value: value)
