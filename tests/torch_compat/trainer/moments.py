"""What the loops do at each moment, written down for a comparison: run with the package's name, prints JSON."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

pl: Any = importlib.import_module(sys.argv[1])
CombinedLoader: Any = importlib.import_module(f"{sys.argv[1]}.utilities").CombinedLoader

warnings.simplefilter("ignore")
logging.disable(logging.INFO)
os.environ["XLATRAIN_EXECUTOR"] = "eager"  # the loops are the same, and nothing has to be compiled

STAGES = ("train", "validation", "test", "predict")
HOOKS = (
    "setup", "configure_optimizers", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start",
    "on_train_end", "on_fit_end", "teardown",
    *[f"on_{stage}_{when}" for stage in STAGES for when in ("start", "epoch_start", "epoch_end", "end")],
    *[f"on_{stage}_batch_{when}" for stage in STAGES for when in ("start", "end")],
    "on_validation_model_eval", "on_validation_model_train", "train_dataloader", "val_dataloader",
)  # fmt: skip


class Rows(Dataset):
    """Draws from all generators for every sample."""

    def __init__(self, rows: int = 6) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()) + random.random() + np.random.rand()])


class Stream(IterableDataset):
    def __init__(self, rows: int = 6) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Rows()[index] for index in range(self.rows))


class Noted(pl.LightningModule):
    """Calls ``note(name)`` in every hook."""

    def __init__(self, note: Callable[[str], None], loaders: dict[str, Callable[[], Any]] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.note = note
        self.loaders = loaders or {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if not isinstance(batch, torch.Tensor):  # of several loaders, of which some may be exhausted
            batch = next(one for one in batch if one is not None)
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> int:
        return batch_idx

    def on_validation_model_eval(self) -> None:
        self.note("on_validation_model_eval")
        super().on_validation_model_eval()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.note("configure_optimizers")
        return torch.optim.SGD(self.parameters(), 1e-3)


class WithLoaders(Noted):
    def train_dataloader(self) -> Any:
        self.note("train_dataloader")
        return self.loaders["train"]()

    def val_dataloader(self) -> Any:
        self.note("val_dataloader")
        return self.loaders["val"]()


def _noting(name: str) -> Callable[..., None]:
    def hook(self: Noted, *args: Any, **kwargs: Any) -> None:
        self.note(name)

    return hook


for _name in HOOKS:
    if _name not in vars(Noted) and not _name.endswith(("dataloader", "sanity_check_start", "sanity_check_end", "model_train")):
        setattr(Noted, _name, _noting(_name))


def trainer(**options: Any) -> Any:
    given = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": 2}
    return pl.Trainer(**{**given, "enable_progress_bar": False, "enable_model_summary": False, **options})


def rows(count: int = 6, *, stream: bool = False, **options: Any) -> DataLoader:
    if stream:
        return DataLoader(Stream(count), 2)
    return DataLoader(Rows(count), 2, **options)


def workers(count: int = 6, **options: Any) -> DataLoader:
    return rows(count, num_workers=1, multiprocessing_context="fork", **options)


# -- random streams ------------------------------------------------------------------------------------------------


def _state_of_generators() -> str:
    states = (torch.random.get_rng_state().tolist(), np.random.get_state()[1:3], random.getstate())
    return hashlib.sha256(repr((states[0], [*map(str, states[1][0]), states[1][1]], states[2])).encode()).hexdigest()[:8]


def _streams(run: Callable[[Callable[..., Noted]], None]) -> list[str]:
    """The state of all generators in every hook."""
    seen: list[str] = []
    pl.seed_everything(3, verbose=False)

    def note(name: str) -> None:
        seen.append(f"{name} {_state_of_generators()}")

    run(lambda kind=Noted, loaders=None: kind(note, loaders))
    return seen


def streams() -> dict[str, list[str]]:
    def fit(train: Any, val: Any = None, **options: Any) -> list[str]:
        return _streams(lambda module: trainer(**options).fit(module(), train, val))

    def reloading(**options: Any) -> list[str]:
        loaders = {"train": lambda: rows(shuffle=True), "val": lambda: rows(shuffle=True)}
        return _streams(lambda module: trainer(**options).fit(module(WithLoaders, loaders)))

    def estimating() -> list[str]:
        def run(module: Any) -> None:
            one = module()
            one.configure_optimizers = lambda: (one.trainer.estimated_stepping_batches, Noted.configure_optimizers(one))[1]
            trainer().fit(one, rows(shuffle=True))

        return _streams(run)

    def again() -> list[str]:
        def run(module: Any) -> None:
            one, same = trainer(max_epochs=1), module()
            one.fit(same, rows(shuffle=True))
            one.fit_loop.max_epochs = 2
            one.fit(same, rows(shuffle=True))

        return _streams(run)

    def evaluating(name: str, data: Any, **options: Any) -> list[str]:
        return _streams(lambda module: getattr(trainer(**options), name)(module(), data))

    shuffled, both = rows(shuffle=True), [rows(4, shuffle=True), rows(6, shuffle=True)]
    return {
        "plain": fit(rows()),
        "shuffled": fit(shuffled),
        "validated": fit(shuffled, rows(shuffle=True)),
        "without sanity check": fit(shuffled, rows(shuffle=True), num_sanity_val_steps=0),
        "all of validation in the sanity check": fit(shuffled, rows(), num_sanity_val_steps=-1),
        "validated within the epoch": fit(shuffled, rows(), val_check_interval=2),
        "every second epoch": fit(shuffled, rows(shuffle=True), check_val_every_n_epoch=2),
        "limited": fit(shuffled, rows(shuffle=True), limit_train_batches=2, limit_val_batches=1),
        "accumulated": fit(shuffled, accumulate_grad_batches=2),
        "steps": fit(shuffled, max_steps=4, max_epochs=-1),
        "workers": fit(workers(shuffle=True), workers()),
        "workers that stay": fit(workers(shuffle=True, persistent_workers=True), workers(persistent_workers=True)),
        "stream": fit(rows(stream=True), rows(stream=True)),
        "stream, limited": fit(rows(stream=True), rows(stream=True), limit_train_batches=2, limit_val_batches=2),
        "several": fit(both, both),
        "several, the longest": fit(CombinedLoader(both, "max_size"), CombinedLoader(both, "max_size")),
        "several, the shortest": fit(CombinedLoader(both, "min_size"), CombinedLoader(both, "min_size")),
        "one of several is limited": fit(shuffled, both, limit_val_batches=0.5),
        "own iterable": fit([torch.randn(2, 2) for _ in range(3)]),
        "reloaded": reloading(reload_dataloaders_every_n_epochs=1),
        "reloaded every second epoch": reloading(reload_dataloaders_every_n_epochs=2, max_epochs=4),
        "reloaded, validated every second epoch": reloading(
            reload_dataloaders_every_n_epochs=1, check_val_every_n_epoch=2, max_epochs=4
        ),
        "loaders of the module": reloading(check_val_every_n_epoch=2, num_sanity_val_steps=0),
        "estimated": estimating(),
        "fitted again": again(),
        "overfit": fit(shuffled, rows(shuffle=True), overfit_batches=2),
        **{f"{name}, shuffled": evaluating(name, shuffled) for name in ("validate", "test", "predict")},
        **{f"{name}, several": evaluating(name, both) for name in ("validate", "test", "predict")},
        **{f"{name}, stream": evaluating(name, rows(stream=True)) for name in ("validate", "test", "predict")},
    }


# -- limits --------------------------------------------------------------------------------------------------------


def limits() -> dict[str, Any]:
    """The batches that each stage sees, of all ways to combine loaders and to limit them."""
    found: dict[str, Any] = {}
    for mode in ("max_size_cycle", "max_size", "min_size", "sequential"):
        for lengths in ((3, 4), (2, None), (5,)):
            for limit in (1, 2, 10, 0.5, 1.0):
                for stage in ("fit", "validate", "test", "predict"):
                    found[f"{mode} {lengths} {limit} {stage}"] = _limited(mode, lengths, limit, stage)
    return found


def _limited(mode: str, lengths: Any, limit: Any, stage: str) -> Any:
    loaders = [rows(6, stream=True) if length is None else rows(2 * length) for length in lengths]
    name = {"fit": "train", "validate": "val"}.get(stage, stage)
    seen: list[str] = []
    one = trainer(max_epochs=1, **{f"limit_{name}_batches": limit})
    try:
        getattr(one, stage)(Noted(seen.append), CombinedLoader(loaders, mode))
    except Exception as error:
        return type(error).__name__
    counted = {"fit": "train", "validate": "validation"}.get(stage, stage)
    return [seen.count(f"on_{counted}_batch_end"), str(getattr(one, f"num_{'training' if stage == 'fit' else name}_batches"))]


# -- resuming ------------------------------------------------------------------------------------------------------


class Saving(pl.Callback):
    """Saves at the n-th call of a hook."""

    def __init__(self, hook: str, number: int, path: str, saved: Callable[[], None]) -> None:
        def save(one: Any, *args: Any) -> None:
            self.calls += not one.sanity_checking
            if self.calls == number:
                one.save_checkpoint(path)
                saved()
                self.calls += 1

        self.calls = 0
        setattr(self, hook, save)


RESUMED_FROM = {
    "on_train_start": (1,), "on_train_epoch_start": (1, 2), "on_train_batch_end": (1, 2, 3, 4, 5), "on_validation_start": (1, 2),
    "on_validation_end": (1, 2), "on_train_epoch_end": (1, 2), "on_train_end": (1,),
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "whole": {},
    "limited": {"limit_train_batches": 2},
    "validated within": {"val_check_interval": 1},
    "limited, validated within": {"limit_train_batches": 2, "val_check_interval": 1},
    "validated every second epoch": {"check_val_every_n_epoch": 2},
    "validated by all batches": {"check_val_every_n_epoch": None, "val_check_interval": 2},
    "accumulated": {"accumulate_grad_batches": 2},
    "steps": {"max_steps": 5, "max_epochs": -1},
    "steps, limited": {"max_steps": 5, "max_epochs": -1, "limit_train_batches": 2},
    "stream": {"stream": True},
    "stream, limited": {"stream": True, "limit_train_batches": 2},
}


class Told(Noted):
    """Notes where the run is, too."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(self.place)
        self.told = note

    def place(self, name: str) -> None:
        if name.startswith(("on_train_", "on_validation_s", "on_validation_end")):
            one = self.trainer
            self.told(f"{name} {one.current_epoch} {one.global_step} {one.fit_loop.batch_idx}")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.told(f"batch {batch_idx} of {batch[:, 0].tolist()}")
        return super().training_step(batch, batch_idx)


def resumes() -> dict[str, Any]:
    """What a run does that continues from each moment of another, and what that one does from there on."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for run, options in RUNS.items():
            for hook, numbers in RESUMED_FROM.items():
                for number in numbers:
                    found[f"{run} {hook} {number}"] = _resumed(hook, number, f"{folder}/{len(found)}.ckpt", **options)
    return found


def _resumed(hook: str, number: int, path: str, *, stream: bool = False, **options: Any) -> dict[str, list[str]] | None:
    rest: list[str] = []
    resumed: list[str] = []
    further = options if "max_steps" in options else {**options, "max_epochs": 3}
    pl.seed_everything(1, verbose=False)
    first = trainer(callbacks=[Saving(hook, number, path, rest.clear)], **(options if hook == "on_train_end" else further))
    first.fit(Told(rest.append), rows(stream=stream, shuffle=True), rows())
    if not os.path.exists(path):
        return None
    pl.seed_everything(2, verbose=False)
    trainer(**further).fit(Told(resumed.append), rows(stream=stream, shuffle=True), rows(), ckpt_path=path)
    return {"resumed": resumed, "rest": rest}


# -- should_stop ---------------------------------------------------------------------------------------------------

STOPPING = (
    "setup", "configure_optimizers", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start",
    "on_train_epoch_start", "on_train_batch_start", "training_step", "on_train_batch_end", "on_validation_start",
    "validation_step", "on_validation_end", "on_train_epoch_end",
)  # fmt: skip


class Stopping(pl.Callback):
    """Sets ``should_stop`` in a hook of an epoch."""

    def __init__(self, hook: str, epoch: int) -> None:
        def stop(one: Any, *args: Any, **kwargs: Any) -> None:
            if one.current_epoch == epoch:
                one.should_stop = True

        setattr(self, hook, stop)


class Stopped(Told):
    def __init__(self, note: Callable[[str], None], hook: str, epoch: int) -> None:
        super().__init__(note)
        self.stops_in, self.stops_at = hook, epoch

    def stop(self, place: str) -> None:
        if place == self.stops_in and self.trainer.current_epoch == self.stops_at:
            self.trainer.should_stop = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.stop("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.stop("validation_step")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.stop("configure_optimizers")
        return super().configure_optimizers()


def stops() -> dict[str, list[str]]:
    """What a run does after ``should_stop`` was set in each hook."""
    found: dict[str, list[str]] = {}
    limits: dict[str, dict[str, Any]] = {
        "": {}, "min_epochs": {"min_epochs": 2}, "min_steps": {"min_steps": 4}, "val_check_interval": {"val_check_interval": 1},
        "stream": {"stream": True},
    }  # fmt: skip
    for name, options in limits.items():
        for hook in STOPPING:
            for epoch in (0, 1):
                found[f"{hook} {epoch} {name}"] = _stopped(hook, epoch, **options)
    return found


def _stopped(hook: str, epoch: int, *, stream: bool = False, **options: Any) -> list[str]:
    seen: list[str] = []
    in_module = hook in ("training_step", "validation_step", "configure_optimizers")
    one = trainer(callbacks=[] if in_module else [Stopping(hook, epoch)], **{"max_epochs": 3, **options})
    one.fit(Stopped(seen.append, hook if in_module else "", epoch), rows(stream=stream), rows())
    return [*seen, f"{one.current_epoch} {one.global_step} {one.should_stop}"]


# -- counters ------------------------------------------------------------------------------------------------------


class Counted(Noted):
    """Notes all progress counters in every hook, and in the steps."""

    def __init__(self, note: Callable[[str], None], skipped: tuple[int, ...] = (), *, manual: bool = False) -> None:
        super().__init__(self.count)
        self.told, self.skipped = note, skipped
        self.automatic_optimization = not manual

    def count(self, name: str) -> None:
        if self._trainer is None:
            return
        fit = self.trainer.fit_loop
        loop = fit.epoch_loop
        optim = loop.automatic_optimization.optim_progress.optimizer
        counted = {
            "epochs": fit.epoch_progress, "batches": loop.batch_progress, "steps": optim.step, "zero_grad": optim.zero_grad,
            "manual": loop.manual_optimization.optim_step_progress, "schedulers": loop.scheduler_progress,
            "validation": loop.val_loop.batch_progress,
        }  # fmt: skip
        of_each = " ".join(f"{key} {_counts(one)}" for key, one in counted.items())
        last = f"{loop.batch_progress.is_last_batch} {loop.val_loop.batch_progress.is_last_batch}"
        index = f"{loop.batch_idx} {loop.total_batch_idx} {loop._batches_that_stepped} {self.trainer.global_step}"
        self.told(f"{name}: {of_each}; {last}; {index} {self.trainer.current_epoch}")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        self.count("training_step")
        if batch_idx in self.skipped:
            return None
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count("validation_step")

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class InSteps(Counted):
    """Logs the counters in the steps, and notes these values."""

    def log_counters(self) -> None:
        loop = self.trainer.fit_loop.epoch_loop
        progress = {
            "train": loop.batch_progress,
            "validation": loop.val_loop.batch_progress,
            "epoch": loop.trainer.fit_loop.epoch_progress,
        }
        for name, one in progress.items():
            for key in ("ready", "started", "processed", "completed"):
                self.log(f"{name} {key}", float(getattr(one.current, key)) + float(getattr(one.total, key)) / 100, batch_size=1)
        self.log("index", float(loop.batch_idx + loop.total_batch_idx / 100), batch_size=1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        self.log_counters()
        return Noted.training_step(self, batch, batch_idx) if not self.skipped else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_counters()

    def count(self, name: str) -> None:
        if self._trainer is not None:
            self.told(f"{name} {sorted((key, round(float(value), 4)) for key, value in self.trainer.callback_metrics.items())}")


def _compiled(run: Callable[[], list[str]]) -> list[str]:
    os.environ["XLATRAIN_EXECUTOR"] = "compiled"
    try:
        return run()
    finally:
        os.environ["XLATRAIN_EXECUTOR"] = "eager"


def _counts(progress: Any) -> str:
    return " ".join(
        "/".join(f"{vars(one)[key]}" for key in sorted(vars(one)) if not key.startswith("_"))
        for one in (progress.current, progress.total)
    )


def counters() -> dict[str, list[str]]:
    """All progress counters in every hook."""

    def fit(module: Callable[..., Counted] = Counted, *, stream: bool = False, **options: Any) -> list[str]:
        seen: list[str] = []
        trainer(**options).fit(module(seen.append), rows(stream=stream), rows(4))
        return seen

    return {
        "compiled": _compiled(lambda: fit(InSteps)),
        "compiled, no loss": _compiled(lambda: fit(lambda note: InSteps(note, (0, 1, 2)), val_check_interval=2)),
        "compiled, accumulated": _compiled(lambda: fit(InSteps, accumulate_grad_batches=2)),
        "plain": fit(),
        "accumulated": fit(accumulate_grad_batches=2),
        "validated within": fit(val_check_interval=2),
        "without sanity check": fit(num_sanity_val_steps=0),
        "every second epoch": fit(check_val_every_n_epoch=2, max_epochs=3),
        "stream": fit(stream=True),
        "limited": fit(limit_train_batches=2, limit_val_batches=1),
        "steps": fit(max_steps=4, max_epochs=-1),
        "no loss": fit(lambda note: Counted(note, (0, 2))),
        "no loss, accumulated": fit(lambda note: Counted(note, (1,)), accumulate_grad_batches=2),
        "manual": fit(lambda note: Counted(note, manual=True)),
    }


# -- gradients -----------------------------------------------------------------------------------------------------


class WithGradients(Noted):
    """Turns gradients on in a hook of validation, and notes whether they are on in all of them and in the steps."""

    def __init__(self, note: Callable[[str], None], hook: str) -> None:
        super().__init__(self.see)
        self.told, self.turned_on_in = note, hook

    def see(self, name: str) -> None:
        self.told(f"{name} {torch.is_grad_enabled()}")
        if name == self.turned_on_in:
            torch.set_grad_enabled(True)

    def slope(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone().requires_grad_()
        return torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=self.training)[0].square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.slope(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.turned_on_in != "on_validation_batch_end" or batch_idx > 0:
            self.log("slope", self.slope(batch))

    def on_train_batch_end(self, *args: Any) -> None:
        self.see("on_train_batch_end")
        self.told(str({name: round(float(value), 4) for name, value in self.trainer.callback_metrics.items()}))


def gradients() -> dict[str, list[str]]:
    def fit(hook: str) -> list[str]:
        seen: list[str] = []
        pl.seed_everything(1, verbose=False)
        x = torch.randn(6, 2)
        trainer(val_check_interval=2).fit(WithGradients(seen.append, hook), DataLoader(x, 2), DataLoader(x, 2))
        return seen

    hooks = ("on_validation_model_eval", "on_validation_start", "on_validation_batch_start", "on_validation_batch_end")
    return {f"{hook} {how.__name__}": how(lambda hook=hook: fit(hook)) for hook in hooks for how in (_compiled, _eager)}


def _eager(run: Callable[[], list[str]]) -> list[str]:
    return run()


if __name__ == "__main__":
    asked = sys.argv[2:] or ["streams", "limits", "resumes", "stops", "counters", "gradients"]
    print(json.dumps({name: globals()[name]() for name in asked}))
