"""A user's strategy: what the loops call of it, and when."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from basics import Regression, regression_data
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from recording import Run, case, main

MEMBERS = (
    "connect", "setup_environment", "setup", "model_to_device", "setup_optimizers", "setup_precision_plugin", "teardown",
    "model_sharded_context", "tensor_init_context", "process_dataloader", "batch_to_device", "on_train_start", "on_train_end",
    "on_train_batch_start", "on_validation_start", "on_validation_end", "on_test_start", "on_test_end", "on_predict_start",
    "on_predict_end", "training_step", "post_training_step", "validation_step", "test_step", "predict_step", "pre_backward",
    "backward", "post_backward", "optimizer_step", "lightning_module_state_dict", "optimizer_state", "save_checkpoint",
    "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict", "remove_checkpoint", "on_exception",
)  # fmt: skip
HOOKS = (
    "setup", "configure_model", "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_fit_end", "teardown",
)  # fmt: skip
CAPTURED = ("training_step", "validation_step", "test_step", "predict_step", "backward")
"""Run once per variant in a compiled step: what they do counts, how often their Python runs does not."""


def noting(kind: type, names: tuple[str, ...], prefix: str, calls: list[str]) -> type:
    """A subclass that writes down the calls of ``names``."""

    def member(name: str) -> Any:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if name not in CAPTURED:
                calls.append(prefix + name)
            return getattr(super(made, self), name)(*args, **kwargs)

        return noted

    made = type(kind.__name__, (kind,), {name: member(name) for name in names})
    return made


def strategy(run: Run, calls: list[str]) -> Any:
    kind = FSDPStrategy if run.strategy == "fsdp" else SingleDeviceStrategy if run.devices == 1 else DDPStrategy
    return noting(kind, MEMBERS, "", calls)()


class Tested(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


@case
def order_of_calls(run: Run) -> None:
    """Fit with validation, save, test, predict, and a resumed fit."""
    calls: list[str] = []
    module = noting(Tested, HOOKS, "module.", calls)
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "limit_train_batches": 2, "limit_val_batches": 1}
    x, y = regression_data(64)
    trainer = run.trainer(strategy=strategy(run, calls), limit_test_batches=1, limit_predict_batches=1, **options)
    model = module()
    run.fit(model, trainer, run.loader(x, y), run.loader(x, y))
    trainer.save_checkpoint(run.root / "a.ckpt")
    trainer.test(model, run.loader(x, y), verbose=False)
    trainer.predict(model, run.loader(x))
    again = run.trainer(strategy=strategy(run, calls), **{**options, "max_epochs": 2, "limit_val_batches": 0})
    again.fit(model := module(), run.loader(x, y), ckpt_path=run.root / "a.ckpt")
    run.note("resumed", [again.global_step, again.current_epoch, *model.parameters()])  # its metrics are those of the checkpoint
    run.note("calls", calls)


class Fails(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        raise ValueError("stopped by the test")


@case
def order_of_calls_with_an_error(run: Run) -> None:
    calls: list[str] = []
    trainer: pl.Trainer = run.trainer(strategy=strategy(run, calls), max_epochs=1)
    try:
        run.fit(Fails(), trainer, run.loader(*regression_data(32)))
    except ValueError:
        run.note("calls", calls)


if __name__ == "__main__":
    main()
