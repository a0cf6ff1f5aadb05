"""``validate``, ``test`` and ``predict``, before, after and without ``fit``."""

from __future__ import annotations

from typing import Any

import evaluation_again  # noqa: F401
import lightning.pytorch as pl
import torch
from basics import Classifier, Regression, class_data, regression_data
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from recording import Run, case, main, numbers, recording_hooks
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


class Evaluated(Classifier):
    """A classifier with all four steps."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).softmax(1)


@case
def validated_alone(run: Run) -> None:
    model, trainer = Evaluated(), run.trainer()
    run.initialise(model)
    run.note("returned", trainer.validate(model, run.loader(*class_data(40)), verbose=False))
    run.finish(model, trainer)


@case
def tested_alone(run: Run) -> None:
    model, trainer = Evaluated(), run.trainer()
    run.initialise(model)
    run.note("returned", trainer.test(model, run.loader(*class_data(40)), verbose=False))
    run.finish(model, trainer)


@case
def tested_on_two_loaders(run: Run) -> None:
    class Two(Evaluated):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.step(batch, "test")
            self.log("same_name", float(dataloader_idx), on_epoch=True)

    model, trainer = Two(), run.trainer()
    run.initialise(model)
    loaders = [run.loader(*class_data(40)), run.loader(*class_data(16, 1))]
    run.note("returned", trainer.test(model, loaders, verbose=False))


@case
def predicted_alone(run: Run) -> None:
    model, trainer = Evaluated(), run.trainer()
    run.initialise(model)
    run.note("returned", trainer.predict(model, run.loader(*class_data(40))))


@case
def predicted_on_two_loaders(run: Run) -> None:
    class Two(Evaluated):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
            return self.net(batch[0]) + dataloader_idx

    model, trainer = Two(), run.trainer(limit_predict_batches=2)
    run.initialise(model)
    run.note("returned", trainer.predict(model, [run.loader(*class_data(40)), run.loader(*class_data(16, 1))]))


@case
def predicted_by_forward(run: Run) -> None:
    class Forward(Evaluated):
        def forward(self, batch: Any) -> Tensor:
            return self.net(batch[0])

        predict_step = pl.LightningModule.predict_step

    model, trainer = Forward(), run.trainer()
    run.initialise(model)
    run.note("returned", trainer.predict(model, run.loader(*class_data(20))))


@case
def predictions_written(run: Run) -> None:
    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *rest: Any) -> None:
            run.record.setdefault("written", []).append([prediction.sum().item(), list(indices), list(rest[1:])])

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            run.note("at the end", [len(predictions), batch_indices])

    model, trainer = Evaluated(), run.trainer(callbacks=[Writer("batch_and_epoch")])
    run.initialise(model)
    returned = trainer.predict(model, run.loader(*class_data(40)), return_predictions=False)
    run.note("returned", returned)


@case
def predictions_edited_after_their_batches(run: Run) -> None:
    class Doubles(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.seen.append(outputs)

        def on_predict_epoch_end(self, trainer: Any, module: Any) -> None:
            for one in self.seen:
                one.mul_(2)

    model, trainer = Evaluated(), run.trainer(callbacks=[Doubles()])
    run.initialise(model)
    run.note("returned", trainer.predict(model, run.loader(*class_data(40))))


@case
def predicted_without_a_method(run: Run) -> None:
    class Raises(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
            run.note("raised", [type(exception).__name__, "`forward`" in str(exception)])

    model = recording_hooks(pl.LightningModule, ["prepare_data", "setup"], "module")()
    model.run = run
    run.trainer(callbacks=[Raises()]).predict(model, run.loader(*regression_data(32)))


@case
def results_are_the_metrics(run: Run) -> None:
    model, trainer, loader = Evaluated(), run.trainer(), run.loader(*class_data(40))
    run.initialise(model)
    found = trainer.validate(model, loader, verbose=False)[0]
    run.note("equal", {name: value == trainer.callback_metrics[name].item() for name, value in found.items()})
    predictions = trainer.predict(model, loader)
    run.note("left", [len(predictions or []), trainer.predict_loop.epoch_batch_indices, len(trainer.predict_loop.predictions)])
    trainer.predict(model, loader, return_predictions=False)
    run.note("left of no predictions", trainer.predict_loop.predictions)


@case
def metrics_read_in_a_sanity_check(run: Run) -> None:
    class Reads(pl.Callback):
        def keep(self, trainer: pl.Trainer) -> None:
            metrics = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
            run.record.setdefault("read", []).append([numbers(dict(sorted(one.items()))) for one in metrics])

        def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.keep(trainer)

        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.keep(trainer)

        def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.keep(trainer)

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.keep(trainer)

    class Twice(Evaluated):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    loader = run.loader(*class_data(40))
    for val in (loader, [loader, run.loader(*class_data(24, 1))]):
        trainer = run.trainer(max_epochs=1, callbacks=[Reads()], enable_checkpointing=False)
        run.fit(Twice(), trainer, loader, val)
    trainer.save_checkpoint(run.root / "saved")
    again = run.trainer(max_epochs=2, callbacks=[Reads()])
    again.fit(Twice(), loader, val, ckpt_path=run.root / "saved")


@case
def all_four_in_turn(run: Run) -> None:
    model = Evaluated()
    checkpoint = ModelCheckpoint(run.root / "saved", monitor="val_accuracy", mode="max")
    states = recording_hooks(pl.Callback, ["load_state_dict"], "callback")()
    states.run, states.state_dict = run, lambda: {"epoch": trainer.current_epoch}
    trainer = run.trainer(max_epochs=3, callbacks=[checkpoint, states], enable_checkpointing=True)
    val = run.loader(*class_data(40, 1))
    run.fit(model, trainer, run.loader(*class_data()), val)
    run.note("validated", trainer.validate(model, val, verbose=False))
    run.note("tested best", trainer.test(model, val, ckpt_path="best", verbose=False))
    run.note("tested by default", trainer.test(dataloaders=val, verbose=False))
    run.note("predicted", trainer.predict(model, val))
    run.finish(model, trainer)


@case
def predicted_with_a_shuffling_batch_sampler(run: Run) -> None:
    data = TensorDataset(*class_data(40))
    batches = BatchSampler(RandomSampler(range(40), generator=torch.Generator().manual_seed(3)), run.batch_size, drop_last=True)
    model, trainer = Evaluated(), run.trainer()
    run.initialise(model)
    run.note("predicted", trainer.predict(model, DataLoader(data, batch_sampler=batches)))


@case
def loaders_of_the_module(run: Run) -> None:
    class Own(Evaluated):
        def train_dataloader(self) -> Any:
            return run.loader(*class_data())

        def val_dataloader(self) -> Any:
            return run.loader(*class_data(32, 1))

        def test_dataloader(self) -> Any:
            return [run.loader(*class_data(16, 2))]

        def predict_dataloader(self) -> Any:
            return run.loader(*class_data(16, 3))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.step(batch, "test")

    model, trainer = Own(), run.trainer(max_epochs=1)
    run.fit(model, trainer)
    run.note("tested", trainer.test(model, verbose=False))
    run.note("predicted", trainer.predict(model))


@case
def order_of_hooks(run: Run) -> None:
    stages = ["validation", "test", "predict"]
    points = ["start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end"]
    hooks = [f"on_{stage}_{point}" for stage in stages for point in points]
    model = recording_hooks(Evaluated, ["setup", "teardown", *hooks, "on_test_model_eval", "on_predict_model_eval"], "module")()
    callback = recording_hooks(pl.Callback, ["setup", "teardown", *hooks], "callback")()
    model.run = callback.run = run
    run.initialise(model)
    trainer, loader = run.trainer(callbacks=[callback], limit_val_batches=2), run.loader(*class_data(40))
    trainer.validate(model, loader, verbose=False)
    trainer.test(model, loader, verbose=False)
    trainer.predict(model, loader)


@case
def inference_modes(run: Run) -> None:
    class Mode(Regression):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

        def on_test_epoch_end(self) -> None:
            run.note("grad and mode", [torch.is_grad_enabled(), self.training])

    model, trainer = Mode(), run.trainer()
    run.initialise(model)
    trainer.test(model, run.loader(*regression_data(32)), verbose=False)
    run.note("afterwards", [torch.is_grad_enabled(), model.training])
    run.finish(model, trainer)


@case
def no_step_to_test(run: Run) -> None:
    model, trainer = Regression(), run.trainer()
    trainer.test(model, run.loader(*regression_data(32)), verbose=False)


@case
def no_best_checkpoint(run: Run) -> None:
    model, trainer = Evaluated(), run.trainer()
    trainer.test(model, run.loader(*class_data(32)), ckpt_path="best", verbose=False)


if __name__ == "__main__":
    main()
