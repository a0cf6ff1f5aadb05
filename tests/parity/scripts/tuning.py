"""Learning rate finder, batch size finder, and what training does after them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from basics import Regression, regression_data
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.tuner import Tuner
from recording import GLOBAL_BATCH, Run, case, main, numbers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tunable(Regression):
    """Has the attributes that are tuned, batch norm, and loaders of its own."""

    def __init__(self, run: Run, batch_size: int | None = None, most: int = 10**9) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 2))
        self.lr = 0.02
        self.batch_size = batch_size or run.batch_size
        self.most = most

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) > self.most:
            raise RuntimeError("CUDA error: out of memory.")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) > self.most:
            raise RuntimeError("CUDA error: out of memory.")
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [adam], [torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*regression_data(160)), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*regression_data(48, 1)), batch_size=self.batch_size)


def note_search(run: Run, model: Tunable, finder: Any) -> None:
    run.note("results", finder.results)
    run.note("suggestions", [finder.suggestion(), finder.suggestion(skip_begin=2, skip_end=3), model.lr])
    run.note("total_batch_idx", finder._total_batch_idx)


@case
def learning_rate_found_then_trained(run: Run) -> None:
    model = Tunable(run)
    run.initialise(model)
    trainer = run.trainer(max_epochs=3)
    note_search(run, model, Tuner(trainer).lr_find(model, num_training=25))
    run.note("after", [trainer.global_step, trainer.current_epoch, trainer.should_stop, str(trainer.state.status)])
    run.note("left", sorted(path.name for path in run.root.glob(".*")))
    run.note("metrics of the search", numbers(trainer.callback_metrics))
    trainer.fit(model)
    run.finish(model, trainer)


@case
def learning_rate_found_by_the_callback(run: Run) -> None:
    finder = LearningRateFinder(min_lr=1e-5, max_lr=10.0, num_training_steps=40, mode="linear", early_stop_threshold=2.0)
    model, trainer = Tunable(run), run.trainer(max_epochs=6, callbacks=[finder])
    run.fit(model, trainer)
    note_search(run, model, finder.optimal_lr)


@case
def learning_rate_found_again_within_the_run(run: Run) -> None:
    class Again(LearningRateFinder):
        def on_fit_start(self, *args: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch in (0, 2):
                self.lr_find(trainer, pl_module)

        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            metrics = numbers(dict(trainer.callback_metrics))
            if trainer.current_epoch == 0:  # stock shows the search's own epoch here, too
                metrics = {"train_loss": metrics["train_loss"]}
            run.record.setdefault("metrics", []).append(metrics)

    model, trainer = Tunable(run), run.trainer(max_epochs=3, callbacks=[Again(num_training_steps=15)])
    run.fit(model, trainer)


@case
def learning_rate_found_with_accumulation(run: Run) -> None:
    model, trainer = Tunable(run), run.trainer(max_epochs=9, accumulate_grad_batches=2)
    run.initialise(model)
    note_search(run, model, Tuner(trainer).lr_find(model, num_training=20, update_attr=False))


@case
def learning_rate_without_an_attribute(run: Run) -> None:
    Tuner(run.trainer(max_epochs=1)).lr_find(Regression(), run.loader(*regression_data()))


def find_size(run: Run, most: int = 10**9, **options: Any) -> int | None:
    """The batch size of the whole mesh; ``most`` and the options' sizes are for it too."""
    share = GLOBAL_BATCH // run.batch_size
    scaled = {name: value // share if name in ("init_val", "max_val") else value for name, value in options.items()}
    model = Tunable(run, most=most)
    run.initialise(model)
    found = Tuner(run.trainer(max_epochs=1)).scale_batch_size(model, **scaled)
    run.note("same weights", run.weights == {} and not any(p.grad is not None for p in model.parameters()))
    assert found == model.batch_size
    return None if found is None else found * share


@case
def batch_sizes_found(run: Run) -> None:
    sizes = [
        find_size(run, 256, init_val=16, mode="binsearch", margin=0.0, max_trials=2, steps_per_trial=1),
        find_size(run, 70, init_val=64),
        find_size(run, 96, init_val=64, mode="binsearch", margin=0.25, steps_per_trial=1),
        find_size(run, init_val=32, max_val=64, method="validate"),
    ]
    run.note("sizes", sizes)


@case
def batch_size_found_by_the_callback(run: Run) -> None:
    share = GLOBAL_BATCH // run.batch_size
    finder = BatchSizeFinder(init_val=16 // share, max_trials=2, steps_per_trial=2)
    run.fit(Tunable(run), run.trainer(max_epochs=2, callbacks=[finder]))
    run.note("size", (finder.optimal_batch_size or 0) * share)


class Watched(Tunable):
    """Writes down each hook, with the sizes of its batch, the calls for loaders, and where torch's generator is."""

    def __init__(self, run: Run, most: int = 10**9) -> None:
        super().__init__(run, most=most)
        self.run, self.seen = run, []
        self.share = GLOBAL_BATCH // run.batch_size

    def saw(self, name: str, *values: Any) -> None:
        self.seen.append([name, *values, int(torch.get_rng_state().sum())])

    def train_dataloader(self) -> DataLoader:
        self.saw("train_dataloader", self.batch_size * self.share)
        return DataLoader(TensorDataset(*regression_data(160)), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        self.saw("val_dataloader", self.batch_size * self.share)
        return super().val_dataloader()

    test_dataloader = predict_dataloader = val_dataloader

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0])


def _watched(name: str) -> Any:
    def hook(self: Watched, *values: Any) -> None:
        trainer = self.trainer
        batch = [float(values[0][0].sum()), self.batch_size * self.share] if name.endswith("batch_start") else []
        self.saw(name, trainer.global_step, trainer.current_epoch, *batch)

    return hook


for _name in (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end", "on_train_end"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_end", "on_test_batch_start", "on_predict_batch_start"),
    *("on_save_checkpoint", "on_load_checkpoint", "on_fit_end"),
):
    setattr(Watched, _name, _watched(_name))


class Stateful(pl.Callback):
    """Counts how often its state is asked for, and given."""

    def __init__(self) -> None:
        self.asked, self.given = 0, []

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"asked": self.asked}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given.append(dict(state_dict))


class Told(Logger):
    """Keeps what it is told about runs."""

    name, version = "told", 0

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.told.append("hyperparameters")

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.told.append(f"metrics of step {step}")

    def finalize(self, status: str) -> None:
        self.told.append(status)


@case
def loggers_learn_that_a_search_is_over(run: Run) -> None:
    logger, model = Told(), Watched(run, 10**9)
    run.initialise(model)
    trainer = run.trainer(max_epochs=1, logger=logger, log_every_n_steps=5)
    Tuner(trainer).lr_find(model, num_training=6)
    Tuner(trainer).scale_batch_size(model, init_val=16 // (GLOBAL_BATCH // run.batch_size), max_trials=1, steps_per_trial=1)
    trainer.fit(model)
    run.note("told", logger.told)


def watch(run: Run, name: str, work: Any, most: int = 10**9, **options: Any) -> None:
    torch.manual_seed(5)
    model, kept = Watched(run, most), Stateful()
    run.initialise(model)
    trainer = run.trainer(max_epochs=2, callbacks=[kept], **options)
    work(trainer, model)
    trainer.fit(model)
    note = {"seen": model.seen, "asked": kept.asked, "given": kept.given, "found": model.batch_size * model.share}
    run.note(name, {**note, "weights": numbers(dict(model.state_dict()))})


@case
def generators_and_hooks_of_searches(run: Run) -> None:
    def size(**options: Any) -> Any:
        share = GLOBAL_BATCH // run.batch_size
        return lambda trainer, model: Tuner(trainer).scale_batch_size(model, init_val=16 // share, **options)

    watch(run, "powers", size(max_trials=2))
    watch(run, "memory ends", size(steps_per_trial=1), most=40)
    watch(run, "halves", size(mode="binsearch", max_trials=3, steps_per_trial=20, margin=0.0), val_check_interval=1)
    watch(run, "limits", size(max_trials=2), limit_train_batches=3, limit_val_batches=1, num_sanity_val_steps=0)
    for method in ("validate", "test", "predict"):
        watch(run, method, size(max_trials=2, method=method, steps_per_trial=2))
    watch(run, "rate", lambda trainer, model: Tuner(trainer).lr_find(model, num_training=12), val_check_interval=4)


@case
def batch_size_without_an_attribute(run: Run) -> None:
    Tuner(run.trainer(max_epochs=1)).scale_batch_size(Tunable(run), batch_arg_name="nothing")


@case
def batch_size_of_given_loaders(run: Run) -> None:
    Tuner(run.trainer(max_epochs=1)).scale_batch_size(Tunable(run), run.loader(*regression_data()))


if __name__ == "__main__":
    main()
