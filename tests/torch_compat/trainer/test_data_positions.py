"""Every kind of loader, saved in the middle of an epoch: the resumed run has the same batches and the same weights."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from torch_compat import LightningModule, Trainer
from torch_compat.trainer import state_io
from torch_compat.utilities.combined_loader import CombinedLoader
from torch_compat.utilities.exceptions import MisconfigurationException

ROWS = 40


class Rows(Dataset):
    """Random draws in every sample: of the worker's generators, or the main process's."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()) + np.random.rand() + random.random()])


class Stream(IterableDataset):
    """Has a state, goes on where it was in the next epoch, and has no length."""

    def __init__(self, count: int = 24) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.tensor([self.at, torch.rand(()) + random.random()])
            if self.at % self.count == 0:
                return

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Finite(IterableDataset):
    """Continues inside of a pass, as torchdata asks it of a dataset: each worker its part."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while self.at < ROWS:
            self.at += 1
            if self.at % step == first:
                yield torch.tensor([self.at, 1.0])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class PythonShuffle(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        order = list(range(ROWS))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return ROWS


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def plain() -> Any:
    return DataLoader(Rows(), 4, shuffle=True)


def own_generator_and_workers() -> Any:
    return DataLoader(Rows(), 4, shuffle=True, generator=seeded(), num_workers=2)


def workers_that_stay() -> Any:
    ordered = TensorDataset(torch.arange(2.0 * ROWS).reshape(ROWS, 2))
    return DataLoader(ordered, 4, shuffle=True, num_workers=1, persistent_workers=True)


def shuffled_by_python() -> Any:
    return DataLoader(Rows(), 4, sampler=PythonShuffle())


def stream() -> Any:
    return DataLoader(Stream(), 4)


def stateful_shuffled() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(TensorDataset(torch.arange(2.0 * ROWS).reshape(ROWS, 2)), 4, shuffle=True)


def stateful_stream_in_workers() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Finite(), 2, num_workers=2)


def several() -> Any:
    return CombinedLoader({"short": DataLoader(Rows(), 8, shuffle=True), "long": DataLoader(Stream(32), 4)}, "max_size_cycle")


def grain_map() -> Any:
    import grain

    return grain.MapDataset.source(np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2)).shuffle(seed=5).batch(4)


def grain_stream() -> Any:
    return grain_map().map(lambda batch: batch * 2).to_iter_dataset()


def grain_loader(batch: int = 4, *, shard_options: Any = None, sampler_shards: Any = None, operations: Any = ()) -> Any:
    import grain

    source = np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2)
    unsharded = grain.sharding.NoSharding()
    sampler = grain.samplers.IndexSampler(ROWS, sampler_shards or unsharded, num_epochs=1, shuffle=True, seed=2)
    return grain.DataLoader(
        data_source=source,
        sampler=sampler,
        operations=[*operations, grain.transforms.Batch(batch)],
        shard_options=shard_options or unsharded,
    )


def even() -> Any:
    import grain

    class Filter(grain.transforms.Filter):
        def filter(self, element: Any) -> bool:
            return bool(element[0] % 4 == 0)

    return Filter()


class Model(LightningModule):
    """Remembers every batch, and saves after, or in the midst of, one."""

    def __init__(self, save: dict[int, Path]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.save = save
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        leaves = list(batch.values()) if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
        return sum((self.layer(leaf / 100).square().mean() for leaf in leaves), torch.zeros(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        leaves = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
        self.seen.append([leaf.tolist() for leaf in leaves])
        if self.trainer.global_step in self.save:
            self.trainer.save_checkpoint(self.save[self.trainer.global_step])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(loader: Callable[[], Any], save: dict[int, Path], resume: Path | None = None) -> Model:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    module = Model(save)
    module.train_dataloader = loader  # asked for in the run, as a module's own is
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=2, max_epochs=3, enable_checkpointing=False, **options)
    if resume is not None:
        torch.manual_seed(9), np.random.seed(9), random.seed(9)
    trainer.fit(module, ckpt_path=resume)
    return module


def check(loader: Callable[[], Any], folder: Path, *, last: bool = False) -> None:
    """Resume in the second epoch: in its midst, and after its last batch."""
    whole = fit(loader, {})
    assert len(whole.seen) % 3 == 0
    epoch = len(whole.seen) // 3
    steps = [2 * epoch] if last else [epoch + 2]
    saved = fit(loader, {step: folder / f"{step}.ckpt" for step in steps})
    assert saved.seen == whole.seen  # saving changes nothing
    for step, path in saved.save.items():
        resumed = fit(loader, {}, path)
        assert resumed.seen == whole.seen[step:], f"resumed after step {step} of {len(whole.seen)}"
        assert torch.equal(resumed.layer.weight, whole.layer.weight)


@pytest.mark.parametrize(
    "loader",
    [plain, own_generator_and_workers, workers_that_stay, shuffled_by_python, stream, stateful_shuffled,
     stateful_stream_in_workers, several, grain_map, grain_stream, grain_loader],
    ids=lambda loader: loader.__name__,
)  # fmt: skip
def test_resumed_in_an_epoch(loader: Callable[[], Any], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no state to continue from")
        check(loader, tmp_path)


@pytest.mark.parametrize("loader", [shuffled_by_python, stream], ids=lambda loader: loader.__name__)
def test_resumed_after_the_last_batch_of_an_epoch(loader: Callable[[], Any], tmp_path: Path) -> None:
    check(loader, tmp_path, last=True)


def test_what_has_no_state_is_read_again_with_a_warning(tmp_path: Path) -> None:
    class Batches:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.full((4, 2), float(index)) for index in range(5))

    with pytest.warns(UserWarning, match=".*Batches` has no state to continue from, so its first 2 batches are read"):
        check(Batches, tmp_path)


RESTORE_TRAINING = state_io.restore_training


def moved(
    loader: Callable[[], Any], path: Path, monkeypatch: pytest.MonkeyPatch, states: list[Any] | None = None, stage: str = "train"
) -> Model:
    """Resumed as if two processes had saved the checkpoint; ``states``: what each of them had of the loader."""

    def restore_training(trainer: Any, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint["xlatrain"]["in_flight"]
        saved["processes"] = 2
        if states is not None:
            saved["states"] = [copy.deepcopy(saved["states"][0]) for _ in states]
            for one, state in zip(saved["states"], states, strict=True):
                (one["train"]["position"]["loaders"] if stage == "train" else one["val"])[0]["own"] = state
        RESTORE_TRAINING(trainer, checkpoint)

    monkeypatch.setattr(state_io, "restore_training", restore_training)
    return fit(loader, {}, path)


def test_on_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved.ckpt"
    whole = fit(plain, {12: path})
    rows = [[[row[0] for row in leaf] for leaf in leaves] for leaves in whole.seen]
    resumed = moved(plain, path, monkeypatch)
    assert [[[row[0] for row in leaf] for leaf in leaves] for leaves in resumed.seen] == rows[12:]

    whole = fit(grain_map, {12: path})
    assert moved(grain_map, path, monkeypatch).seen == whole.seen[14:]  # two items were done at each of two steps


def test_streams_on_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continued where their state says how; refused where it does not."""
    path = tmp_path / "saved.ckpt"
    whole = fit(stream, {5: path})
    with pytest.raises(MisconfigurationException, match=r"`DataLoader\(Stream\)` on 2 processes, and this run has 1: each"):
        moved(stream, path, monkeypatch)

    def resharded(self: Stream, states: list[dict[str, int]], process_index: int, process_count: int) -> dict[str, int]:
        assert (process_index, process_count) == (0, 1)
        return {"at": sum(state["at"] for state in states)}

    monkeypatch.setattr(Stream, "reshard_state_dicts", resharded, raising=False)
    continued = moved(stream, path, monkeypatch, [{"at": 23}, {"at": 17}])  # of the 40 rows of five steps, in any shares
    assert [[row[0] for row in leaf] for leaves in continued.seen for leaf in leaves] == [
        [row[0] for row in leaf] for leaves in whole.seen[5:] for leaf in leaves
    ]


def test_a_grain_loader_on_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grain

    def states(process: int, batches: int, **options: Any) -> Any:
        sharded = grain.sharding.ShardOptions(process, 2)
        iterator = iter(grain_loader(2, shard_options=sharded, **options))
        for _ in range(batches):
            next(iterator)
        return iterator.get_state()

    path = tmp_path / "saved.ckpt"
    whole = fit(grain_loader, {13: path})  # three batches of the second epoch
    resumed = moved(grain_loader, path, monkeypatch, [states(0, 3), states(1, 3)])
    assert resumed.seen == whole.seen[13:]
    for saved, reason in (
        ([states(0, 3), states(1, 2)], "not read the same number of records"),
        ([states(0, 1), states(1, 1)][:1] * 2, "not read the same number"),
        ([states(p, 3, sampler_shards=grain.sharding.ShardOptions(p, 2)) for p in range(2)], "orders each shard by itself"),
    ):
        with pytest.raises(MisconfigurationException, match=f"`grain.DataLoader` on 2 processes.*{reason}"):
            moved(grain_loader, path, monkeypatch, saved)
    with pytest.raises(MisconfigurationException, match=r"only records that are mapped"):
        moved(lambda: grain_loader(operations=[even()]), path, monkeypatch, [states(0, 3), states(1, 3)])
    with pytest.raises(MisconfigurationException, match=r"a grain.IterDataset does not say"):
        fit(grain_stream, {12: path})
        moved(grain_stream, path, monkeypatch)


def test_a_validation_stream_on_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two passes a state that all had is begun with, and said; states that differ are refused."""
    path = tmp_path / "saved.ckpt"
    monkeypatch.setattr(Model, "val_dataloader", lambda self: DataLoader(Finite(), 4), raising=False)
    monkeypatch.setattr(Model, "validation_step", lambda self, batch, batch_idx: None, raising=False)
    fit(plain, {7: path})
    with pytest.warns(UserWarning, match=r"`DataLoader\(Finite\)` had the same state on all 2 processes"):
        moved(plain, path, monkeypatch)
    with pytest.raises(MisconfigurationException, match=r"val_dataloader: .*`DataLoader\(Finite\)` on 2 processes"):
        moved(plain, path, monkeypatch, [{"at": 0}, {"at": 4}], "val")
