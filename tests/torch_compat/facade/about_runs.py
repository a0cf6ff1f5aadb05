"""The Trainer: its arguments, small runs and what they return; data modules; copies and pickles; command lines; Fabric."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from answering import ask, ask_each, attempt
from lightning.fabric import Fabric, is_wrapped
from lightning.fabric.plugins import Precision
from lightning.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer
from lightning.pytorch import callbacks as cb
from lightning.pytorch.cli import LightningCLI, instantiate_class
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringDataModule, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}


def trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(**{**QUIET, **options})


WRONG: dict[str, list[Any]] = {
    "accelerator": ["abacus", 3, "mps", "hpu"],
    "strategy": ["quantum", 3, "dp", "ddp_sharded"],
    "devices": ["many", 0, -5, 1.5, [], [0, 0], "0", "", None],
    "num_nodes": ["two", 0, -1],
    "precision": ["7-mixed", 8, "mixed", 32.0, "16", "bf16", 64],
    "logger": ["csv", 3, [3]],
    "callbacks": [[3], "callback", 3],
    "fast_dev_run": [-1, 1.5, "yes"],
    "max_epochs": [-2, 1.5, "two"],
    "max_steps": [-2, None],
    "max_time": ["soon", 3, {"weeks": "x"}, "00:61:00:00"],
    "limit_train_batches": [-1, 1.5, "half", -0.5],
    "limit_val_batches": [-1, 2.5],
    "limit_test_batches": [-1],
    "limit_predict_batches": [-0.1],
    "overfit_batches": [-1, 1.5, "one"],
    "val_check_interval": [1.5, -1, "never", -0.5, "00:00:00", {"x": 1}],
    "check_val_every_n_epoch": [0, -1, 1.5, "x", None],
    "num_sanity_val_steps": [-2, 1.5],
    "log_every_n_steps": [-1, 1.5],
    "accumulate_grad_batches": [0, -1, 1.5, "x", {0: 1}],
    "gradient_clip_val": ["much", -1],
    "gradient_clip_algorithm": ["other", 3],
    "deterministic": ["maybe", 3],
    "benchmark": ["maybe"],
    "profiler": ["other", 3],
    "reload_dataloaders_every_n_epochs": [-1, 1.5, "x"],
    "default_root_dir": [3],
    "plugins": ["other", [3], 3],
    "sync_batchnorm": ["x"],
    "barebones": [True],
    "gpus": [1],
    "resume_from_checkpoint": ["x"],
    "auto_lr_find": [True],
}
ask_each(
    **{
        f"trainer_{name}_{index}": lambda name=name, value=value: type(pl.Trainer(**{**QUIET, name: value})).__name__
        for name, values in WRONG.items()
        for index, value in enumerate(values)
    }
)

ask_each(
    trainer_positional=lambda: pl.Trainer("cpu"),
    trainer_steps_and_epochs=lambda: [
        trainer().max_epochs,
        trainer(max_steps=5).max_epochs,
        trainer(max_epochs=-1).max_epochs,
        trainer(max_time="00:00:01:00").max_epochs,
    ],
    trainer_two_bars=lambda: trainer(enable_progress_bar=True, callbacks=[cb.RichProgressBar(), cb.TQDMProgressBar()]),
    trainer_bar_and_off=lambda: trainer(callbacks=[cb.TQDMProgressBar()]),
    trainer_checkpoint_and_off=lambda: trainer(callbacks=[cb.ModelCheckpoint()]),
    trainer_timer_and_time=lambda: [
        type(one).__name__ for one in trainer(max_time="00:00:01:00", callbacks=[cb.Timer(timedelta(1))]).callbacks
    ],
    trainer_same_keys=lambda: trainer(enable_checkpointing=True, callbacks=[cb.ModelCheckpoint(), cb.ModelCheckpoint()]),
    trainer_accumulation=lambda: (
        trainer(accumulate_grad_batches=2, callbacks=[cb.GradientAccumulationScheduler({1: 2})]).accumulate_grad_batches
    ),
    trainer_barebones_callbacks=lambda: pl.Trainer(accelerator="cpu", devices=1, barebones=True, callbacks=[cb.ModelSummary()]),
    trainer_barebones=lambda: (lambda t: [t.callbacks, t.loggers, t.num_sanity_val_steps, t.log_every_n_steps])(
        pl.Trainer(accelerator="cpu", devices=1, barebones=True)
    ),
    trainer_barebones_logger=lambda: pl.Trainer(accelerator="cpu", devices=1, barebones=True, logger=True),
    trainer_order=lambda: [
        type(one).__name__
        for one in pl.Trainer(
            accelerator="cpu", devices=1, logger=False, callbacks=[cb.ModelCheckpoint(), cb.LambdaCallback(), cb.Timer()]
        ).callbacks
    ],
    trainer_fast_dev_run=lambda: (
        lambda t: [
            t.max_epochs,
            t.max_steps,
            t.limit_train_batches,
            t.limit_val_batches,
            t.num_sanity_val_steps,
            t.val_check_interval,
            t.check_val_every_n_epoch,
            len(t.loggers),
            type(t.logger).__name__,
        ]
    )(pl.Trainer(accelerator="cpu", devices=1, fast_dev_run=3, logger=CSVLogger("."))),
    trainer_overfit=lambda: (lambda t: [t.limit_train_batches, t.limit_val_batches, t.overfit_batches])(
        trainer(overfit_batches=2)
    ),
    trainer_members=lambda: {name: attempt(lambda name=name: getattr(ONE, name)) for name in MEMBERS},
)
ONE = trainer(max_epochs=2)
MEMBERS = (
    *("callback_metrics", "checkpoint_callback", "checkpoint_callbacks", "ckpt_path", "current_epoch"),
    *("distributed_sampler_kwargs", "early_stopping_callback", "early_stopping_callbacks", "enable_validation"),
    *("estimated_stepping_batches", "evaluating", "global_rank", "global_step", "interrupted", "is_global_zero"),
    *("is_last_batch", "lightning_module", "local_rank", "logged_metrics", "logger", "loggers", "lr_scheduler_configs"),
    *("max_epochs", "max_steps", "min_epochs", "min_steps", "model", "node_rank", "num_nodes", "num_predict_batches"),
    *("num_test_batches", "num_training_batches", "optimizers", "precision", "predict_dataloaders", "predicting"),
    *("progress_bar_callback", "progress_bar_metrics", "received_sigterm", "sanity_checking", "scaler"),
    *("test_dataloaders", "testing", "train_dataloader", "training", "val_dataloaders", "validating", "world_size"),
)


class Net(pl.LightningModule):
    """One layer, with a hyperparameter."""

    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self(batch).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val/loss", torch.tensor(2.0))
        self.log("count", 3.0, on_step=True, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"rows": torch.tensor(len(batch)), "batch": batch_idx, "loader": dataloader_idx}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.hparams.lr)


def data(rows: int = 6) -> DataLoader:
    torch.manual_seed(0)
    return DataLoader(RandomDataset(4, rows), batch_size=2)


# -- runs ----------------------------------------------------------------------------------------------------------------


def _seeded() -> Net:
    torch.manual_seed(1)
    return Net()


def go_on(one: pl.Trainer) -> Any:
    """A copied Trainer, fitting its own copy of the module for another epoch."""
    before = one.lightning_module.layer.weight.clone()
    one.fit_loop.max_epochs = 2
    one.fit(one.lightning_module, data())
    return [one.global_step, one.current_epoch, bool((before != one.lightning_module.layer.weight).any())]


@ask
def fitted() -> Any:
    """One run whose many results are looked at."""
    torch.manual_seed(1)
    model, one = Net(), trainer(max_epochs=1, log_every_n_steps=1, logger=CSVLogger(".", name="log"), enable_checkpointing=True)
    before = attempt(lambda: one.save_checkpoint("early.ckpt"))
    one.fit(model, data(), data(4))
    found: dict[str, Any] = {"before": before}
    found["members"] = {name: attempt(lambda name=name: getattr(one, name)) for name in MEMBERS if name != "ckpt_path"}
    found["returned"] = attempt(lambda: one.validate(model, data(4)))
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        found[name] = getattr(one, name)
    found["best"] = attempt(lambda: one.checkpoint_callback.best_model_path)
    found["validates best"] = attempt(lambda: one.validate(dataloaders=[data(2), data(2)], ckpt_path="best", verbose=False))
    one.save_checkpoint("end.ckpt")
    loaded = Net.load_from_checkpoint("end.ckpt", lr=0.5)
    found["loaded"] = [loaded.hparams, loaded.training, torch.equal(loaded.layer.weight, model.layer.weight)]
    found["trainer copies"] = attempt(lambda: type(copy.deepcopy(one)))
    found["copy goes on"] = attempt(lambda: go_on(copy.deepcopy(one)))
    found["trainer pickled"] = attempt(lambda: pickle.loads(pickle.dumps(one)).global_step)
    found["module copies"] = attempt(lambda: copy.deepcopy(model).layer.weight)
    found["pickled"] = attempt(lambda: pickle.loads(pickle.dumps(model)).layer.weight)
    torch.save(model, "whole.pt")
    found["saved whole"] = attempt(lambda: torch.load("whole.pt", weights_only=False).layer.weight)
    found["log"] = sorted(os.listdir("log/version_0"))
    found["csv"] = Path("log/version_0/metrics.csv").read_text().splitlines()[0]
    found["state"] = [str(one.state.fn), str(one.state.status), str(one.state.stage), one.state.finished, one.state.stopped]
    found["module"] = {
        name: attempt(lambda name=name: getattr(model, name))
        for name in (
            "current_epoch",
            "global_step",
            "global_rank",
            "local_rank",
            "on_gpu",
            "fabric",
            "automatic_optimization",
            "strict_loading",
            "example_input_array",
            "device_mesh",
            "logger",
            "loggers",
            "hparams",
            "trainer",
            "device",
            "dtype",
        )
    }
    found["nothing"] = [
        attempt(lambda: one.fit(model, data(), ckpt_path="no.ckpt")),
        attempt(lambda: one.test(dataloaders=data(2), ckpt_path="no.ckpt")),
    ]
    return found


@ask
def predicted() -> Any:
    torch.manual_seed(1)
    one, model = trainer(), Net()
    return [
        one.predict(model, data()),
        one.predict(model, [data(2), data(4)]),
        one.predict(model, {"a": data(2), "b": data(2)}),
        one.predict(model, data(), return_predictions=False),
        attempt(lambda: one.predict(model)),
        attempt(lambda: one.predict(None, data(2))),
    ]


@ask
def printed_tables() -> Any:
    one = trainer()
    return [one.validate(Net(), data(2)), one.test(Net(), [data(2), data(2)])]


class LongNames(Net):
    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("a_rather_long_name_of_a_metric_that_is_logged", float(dataloader_idx))
        self.log("int", 3)
        self.log(f"only_{dataloader_idx}", 1.0, add_dataloader_idx=False)


class SameName(Net):
    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("same", 1.0, add_dataloader_idx=False)


@ask
def one_name_of_two_loaders() -> Any:
    return trainer().validate(SameName(), [data(2), data(2)])


@ask
def printed_several_tables() -> Any:
    return trainer().validate(LongNames(), [data(2) for _ in range(3)])


class NoLoss(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return {"losses": self(batch).sum()}


class NoTrain(pl.LightningModule):
    configure_optimizers = Net.configure_optimizers


class NoOptimizer(pl.LightningModule):
    training_step = Net.training_step


class NoneOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


class TextOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return "adam"


class BadScheduler(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [{"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)}]


class BadInterval(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "week"}]


class NoMonitor(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)}


class WrongMonitor(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "no"},
        }


class LogsTwice(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self(batch).sum()
        self.log("a", loss, on_step=True)
        self.log("a", loss, on_step=False, on_epoch=True)
        return loss


class LogsText(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("a", "text")
        return self(batch).sum()


class LogsVector(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("a", self(batch))
        return self(batch).sum()


class LogsNested(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("a", {"b": 1})
        return self(batch).sum()


class LogsBadName(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("a/dataloader_idx_0", 1.0)
        return self(batch).sum()


class LogsReduced(Net):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("a", 1.0, on_epoch=True, reduce_fx="median")
        return self(batch).sum()


class LogsInWrongHook(Net):
    def on_fit_start(self) -> None:
        self.log("a", 1.0)


class LogsStepInEpochHook(Net):
    def on_train_epoch_end(self) -> None:
        self.log("a", 1.0, on_step=True)


class OldHook(Net):
    def training_epoch_end(self, outputs: Any) -> None: ...


class OldStep(Net):
    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any: ...


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.2)]


WRONG_MODULES = (
    *(NoLoss, NoTrain, NoOptimizer, NoneOptimizer, TextOptimizer, BadScheduler, BadInterval, NoMonitor, WrongMonitor, LogsTwice),
    *(
        LogsText,
        LogsVector,
        LogsNested,
        LogsBadName,
        LogsReduced,
        LogsInWrongHook,
        LogsStepInEpochHook,
        OldHook,
        OldStep,
        TwoOptimizers,
    ),
)
ask_each(
    **{
        f"module_{kind.__name__}": lambda kind=kind: trainer(max_epochs=1, limit_train_batches=1).fit(kind(), data(2))
        for kind in WRONG_MODULES
    }
)

ask_each(
    fits_nothing=lambda: trainer(max_epochs=1).fit(Net()),
    fits_linear=lambda: trainer(max_epochs=1).fit(nn.Linear(1, 1), data()),
    fits_both=lambda: trainer(max_epochs=1).fit(Net(), data(), datamodule=BoringDataModule()),
    fits_number=lambda: trainer(max_epochs=1).fit(Net(), 3),
    fits_empty=lambda: trainer(max_epochs=1).fit(Net(), []),
    fits_loader_as_datamodule=lambda: trainer(max_epochs=1).fit(Net(), datamodule=data()),
    fits_zero=lambda: trainer(max_epochs=0).fit(Net(), data()),
    fits_from_missing=lambda: trainer(max_epochs=1).fit(Net(), data(), ckpt_path="no.ckpt"),
    fits_from_best=lambda: trainer(max_epochs=1).fit(Net(), data(), ckpt_path="best"),
    fits_from_last=lambda: trainer(max_epochs=1).fit(Net(), data(), ckpt_path="last"),
    validates_none=lambda: trainer().validate(None, data()),
    validates_without_loader=lambda: trainer().validate(Net()),
    validates_without_step=lambda: trainer().validate(pl.LightningModule(), data()),
    validates_best=lambda: trainer().validate(Net(), data(), ckpt_path="best"),
    predicts_without_loader=lambda: trainer().predict(Net()),
    stops_on_missing=lambda: trainer(max_epochs=1, callbacks=[cb.EarlyStopping("nothing")]).fit(Net(), data(2), data(2)),
    monitors_missing=lambda: trainer(
        max_epochs=1, enable_checkpointing=True, callbacks=[cb.ModelCheckpoint(".", monitor="nothing")]
    ).fit(Net(), data(2), data(2)),
    lr_without_logger=lambda: trainer(max_epochs=1, callbacks=[cb.LearningRateMonitor()]).fit(Net(), data(2)),
    swa_and_two=lambda: trainer(max_epochs=1, callbacks=[cb.StochasticWeightAveraging(0.1)]).fit(TwoOptimizers(), data(2)),
    loads_missing=lambda: Net.load_from_checkpoint("no.ckpt"),
    loads_on_instance=lambda: Net().load_from_checkpoint("no.ckpt"),
    trainer_pickles=lambda: type(pickle.loads(pickle.dumps(trainer()))),
    module_without_trainer=lambda: Net().trainer,
    logs_without_trainer=lambda: Net().log("a", 1.0),
    module_steps=lambda: [
        attempt(lambda: pl.LightningModule().training_step()),
        attempt(lambda: pl.LightningModule().forward()),
        attempt(lambda: pl.LightningModule().configure_optimizers()),
        attempt(lambda: pl.LightningModule().train_dataloader()),
        attempt(lambda: pl.LightningModule().optimizers()),
        attempt(lambda: pl.LightningModule().lr_schedulers()),
    ],
    module_alone=lambda: {
        name: attempt(lambda name=name: getattr(Net(), name))
        for name in (
            "current_epoch",
            "global_step",
            "global_rank",
            "local_rank",
            "on_gpu",
            "fabric",
            "automatic_optimization",
            "strict_loading",
            "example_input_array",
            "device_mesh",
            "logger",
            "loggers",
            "hparams",
            "dtype",
            "device",
        )
    },
    module_prints=lambda: Net().print("hello"),
    module_freezes=lambda: (
        lambda m: [m.freeze(), m.training, m.layer.weight.requires_grad, m.unfreeze(), m.training, m.layer.weight.requires_grad]
    )(Net()),
    module_strict=lambda: (lambda m: [m.strict_loading, setattr(m, "strict_loading", False), m.strict_loading])(Net()),
    module_exports=lambda: [
        attempt(lambda: type(Net().to_torchscript())),
        attempt(lambda: type(Net().to_torchscript(method="trace", example_inputs=torch.ones(1, 4)))),
        attempt(lambda: Net().to_torchscript(method="other")),
        attempt(lambda: Net().to_torchscript(method="trace")),
    ],
    module_torchscript_runs=lambda: _seeded().to_torchscript()(torch.ones(1, 4)),
    module_onnx=lambda: Net().to_onnx("a.onnx"),
    module_onnx_sample=lambda: Net().to_onnx("a.onnx", torch.ones(1, 4)),
    module_tensorrt=lambda: Net().to_tensorrt("a"),
)


# -- data modules --------------------------------------------------------------------------------------------------------


class Data(pl.LightningDataModule):
    def __init__(self, size: int = 3, name: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters()


def _loader_facts(loader: Any) -> Any:
    if isinstance(loader, list):
        return [_loader_facts(one) for one in loader]
    return [loader.batch_size, loader.num_workers, loader.pin_memory, type(loader.sampler).__name__]


@ask
def data_modules() -> Any:
    sets = [RandomDataset(2, 4), RandomDataset(2, 6)]
    made = pl.LightningDataModule.from_datasets(sets[0], sets, sets[1], None, batch_size=3, num_workers=0)
    again = Data.from_datasets(sets[0], batch_size=2, size=9)
    return [
        *(_loader_facts(getattr(made, f"{stage}_dataloader")()) for stage in ("train", "val", "test")),
        attempt(made.predict_dataloader),
        again.hparams,
        [Data(4).hparams, str(Data(4)), str(made), Data().trainer, Data(4).name, Data.__name__],
        attempt(lambda: Data.load_from_checkpoint("no.ckpt")),
        attempt(lambda: Data().load_from_checkpoint("no.ckpt")),
        attempt(Data().train_dataloader),
        [
            Data().state_dict(),
            attempt(Data().prepare_data),
            attempt(lambda: Data().setup("fit")),
            attempt(lambda: Data().teardown("fit")),
        ],
        [
            Data().prepare_data_per_node,
            Data().allow_zero_length_dataloader_with_multiple_devices,
            attempt(lambda: Data().transfer_batch_to_device([torch.ones(1)], torch.device("cpu"), 0)),
        ],
    ]


# -- command lines -------------------------------------------------------------------------------------------------------


class Wide(Net):
    pass


class SomeCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.size", "model.width")
        parser.set_defaults({"model.lr": 0.25})


def command(arguments: Any, cls: type = SomeCLI, **options: Any) -> Any:
    defaults = {"trainer_defaults": {**QUIET, "max_epochs": 1}, "run": False, "save_config_callback": None}
    return cls(Net, Data, args=arguments, **{**defaults, **options})


def _parts(cli: Any) -> Any:
    return [cli.model.hparams, cli.datamodule.hparams, cli.trainer.max_epochs, type(cli.model).__name__, cli.subcommand]


ask_each(
    cli_plain=lambda: _parts(command([])),
    cli_linked=lambda: _parts(command(["--data.size=7", "--trainer.max_epochs=3"])),
    cli_dict=lambda: _parts(command({"data": {"size": 5}, "model": {"lr": 0.5}})),
    cli_unknown=lambda: command(["--model.depth=3"]),
    cli_unknown_trainer=lambda: command(["--trainer.depth=3"]),
    cli_wrong_kind=lambda: command(["--model.lr=much"]),
    cli_help=lambda: command(["--help"]) and None,
    cli_no_subcommand=lambda: command([], run=True),
    cli_wrong_subcommand=lambda: command(["train"], run=True),
    cli_subclasses=lambda: _parts(
        LightningCLI(
            pl.LightningModule,
            pl.LightningDataModule,
            args=["--model=about_runs.Wide", "--model.width=3", "--data=about_runs.Data"],
            run=False,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_defaults=QUIET,
            save_config_callback=None,
        )
    ),
    cli_missing_subclass=lambda: LightningCLI(
        pl.LightningModule, args=["--model=about_runs.Nothing"], run=False, subclass_mode_model=True, trainer_defaults=QUIET
    ),
    cli_optimizer=lambda: (
        lambda cli: [type(cli.model.configure_optimizers()[0][0]).__name__, type(cli.model.configure_optimizers()[1][0]).__name__]
    )(command(["--optimizer=Adam", "--optimizer.lr=0.01", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=2"])),
    cli_unknown_optimizer=lambda: command(["--optimizer=Nothing"]),
    cli_defaults=lambda: command([], trainer_defaults={**QUIET, "callbacks": cb.Timer()}).trainer.callbacks,
    cli_bad_run=lambda: command(["fit"], run=False),
    cli_instantiates=lambda: instantiate_class(
        (torch.ones(1, requires_grad=True),), {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    ).defaults["lr"],
    cli_instantiates_list=lambda: instantiate_class(
        [[torch.ones(1, requires_grad=True)]], {"class_path": "torch.optim.Adam", "init_args": {}}
    ).defaults["lr"],
)


@ask
def cli_prints_config() -> Any:
    return command(["--print_config"])


@ask
def cli_reads_config() -> Any:
    Path("c.yaml").write_text("model:\n  lr: 0.75\ndata:\n  size: 6\ntrainer:\n  max_epochs: 4\n")
    return [
        _parts(command(["--config=c.yaml"])),
        _parts(command(["--config", "c.yaml", "--model.lr=1.5"])),
        attempt(lambda: command(["--config=no.yaml"])),
    ]


@ask
def cli_reads_environment() -> Any:
    os.environ["PL_MODEL__LR"] = "0.125"
    try:
        return _parts(command([], parser_kwargs={"default_env": True}))
    finally:
        del os.environ["PL_MODEL__LR"]


@ask
def cli_reads_argv() -> Any:
    before, sys.argv = sys.argv, ["any.py", "--model.lr=0.5"]
    try:
        return [_parts(command(None)), attempt(lambda: _parts(command(["--model.lr=0.75"])))]
    finally:
        sys.argv = before


@ask
def cli_saves_config() -> Any:
    def fit() -> Any:
        return LightningCLI(
            Net,
            BoringData,
            args=["fit", "--seed_everything=3"],
            trainer_defaults={
                **QUIET,
                "limit_train_batches": 1,
                "limit_val_batches": 0,
                "max_epochs": 1,
                "default_root_dir": "out",
            },
        ).trainer.global_step

    return [attempt(fit), sorted(os.listdir("out")), attempt(fit), Path("out/config.yaml").read_text().splitlines()[1:]]


class BoringData(BoringDataModule):
    def setup(self, stage: str) -> None:
        self.random_train = self.random_val = self.random_test = RandomDataset(4, 4)


# -- Fabric --------------------------------------------------------------------------------------------------------------


def fabric(**options: Any) -> Fabric:
    return Fabric(**{"accelerator": "cpu", "devices": 1, **options})


@ask
def wrapped_objects() -> Any:
    one = fabric()
    net = nn.Linear(2, 1)
    module, optimizer = one.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = one.setup_dataloaders(DataLoader(RandomDataset(2, 4), batch_size=2))
    return [
        [isinstance(module, _FabricModule), isinstance(optimizer, _FabricOptimizer), isinstance(loader, _FabricDataLoader)],
        [is_wrapped(module), is_wrapped(net), is_wrapped(optimizer), is_wrapped(loader)],
        [module.module is net, isinstance(optimizer, torch.optim.SGD), type(optimizer.optimizer).__name__, len(loader)],
        sorted(module.state_dict()),
        [sorted(optimizer.state_dict()), optimizer.param_groups[0]["lr"], optimizer.defaults["lr"]],
        attempt(lambda: module.mark_forward_method("no_such")),
        attempt(lambda: one.setup(module)),
        attempt(lambda: one.setup_optimizers(optimizer)),
        attempt(lambda: one.setup_dataloaders(loader)),
        attempt(lambda: one.setup(3)),
        attempt(lambda: one.setup_dataloaders()),
        attempt(lambda: one.setup_dataloaders(3)),
        attempt(lambda: one.setup_optimizers()),
        attempt(lambda: module.missing),
        attempt(lambda: setattr(module, "extra", 1)),
        attempt(lambda: net.extra),
        attempt(lambda: copy.deepcopy(module).module.weight.shape),
    ]


ask_each(
    fabric_members=lambda: (
        lambda one: [
            one.world_size,
            one.global_rank,
            one.local_rank,
            one.node_rank,
            one.is_global_zero,
            str(one.device),
            attempt(lambda: one.logger),
            one.loggers,
        ]
    )(fabric()),
    fabric_wrong=lambda: [
        attempt(lambda o=o: fabric(**o))
        for o in (
            {"accelerator": "abacus"},
            {"devices": 0},
            {"devices": "many"},
            {"strategy": "quantum"},
            {"precision": "7"},
            {"num_nodes": 0},
            {"plugins": "x"},
            {"callbacks": 3},
            {"loggers": 3},
        )
    ],
    fabric_calls=lambda: fabric(callbacks=[type("A", (), {"on_x": lambda self, a: print("x", a)})()]).call("on_x", a=3),
    fabric_calls_nothing=lambda: fabric(callbacks=[type("A", (), {"on_x": 3})()]).call("on_x"),
    fabric_logs=lambda: fabric().log("a", 1.0),
    fabric_launches=lambda: fabric().launch(lambda f: f.world_size),
    fabric_launches_wrong=lambda: [attempt(lambda: fabric().launch(3)), attempt(lambda: fabric().launch(lambda: 3))],
    fabric_clips_both=lambda: _clips(clip_val=1.0, max_norm=1.0),
    fabric_clips_nothing=lambda: _clips(),
    fabric_clips=lambda: _clips(max_norm=0.5),
    fabric_no_sync=lambda: [attempt(lambda: fabric().no_backward_sync(nn.Linear(1, 1)).__enter__())],
    fabric_runs_twice=lambda: type("F", (Fabric,), {"run": lambda self, a: a + 1})(accelerator="cpu", devices=1).run(1),
    fabric_reduces=lambda: [
        fabric().all_reduce(torch.ones(1)),
        fabric().all_gather(torch.ones(2)).shape,
        fabric().broadcast({"a": 1}),
        fabric().barrier(),
    ],
    fabric_moves=lambda: [
        fabric().to_device(torch.ones(1)),
        type(fabric().to_device(nn.Linear(1, 1))).__name__,
        fabric().to_device({"a": [torch.ones(1)]}),
    ],
    fabric_seeds=lambda: fabric().seed_everything(3),
)


def _clips(**options: Any) -> Any:
    one, net = fabric(), nn.Linear(2, 1)
    module, optimizer = one.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    one.backward(module(torch.ones(1, 2)).sum())
    return one.clip_gradients(module, optimizer, **options)


class Told(Precision):
    """A precision plugin of Fabric that writes down what is called around a backward pass."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> None:
        self.calls.append("before")

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        super().backward(tensor * 2, model, *args, **kwargs)

    def post_backward(self, tensor: torch.Tensor, module: Any) -> None:
        self.calls.append("after")


@ask
def fabric_precision_plugin() -> Any:
    plugin = Told()
    one, net = fabric(plugins=[plugin]), nn.Linear(2, 1)
    module, _ = one.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    one.backward(module(torch.ones(1, 2)).sum())
    return [plugin.calls, net.weight.grad]


@ask
def fabric_files() -> Any:
    one, net = fabric(), nn.Linear(2, 1)
    net.weight.data.fill_(0.5)
    module, optimizer = one.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    one.save("a.ckpt", {"model": module, "optimizer": optimizer, "step": 3})
    state = {"model": module, "step": 0}
    rest = one.load("a.ckpt", state)
    return [
        sorted(rest),
        state["step"],
        sorted(one.load("a.ckpt")),
        attempt(lambda: one.load("no.ckpt")),
        attempt(lambda: one.load("a.ckpt", {"nothing": 1})),
        attempt(lambda: one.load("a.ckpt", {})),
        attempt(lambda: one.save("b.ckpt", {"model": module}, filter={"nothing": lambda k, v: True})),
        attempt(lambda: one.save("b.ckpt", {"model": module}, filter={"model": 3})),
        attempt(lambda: one.load("a.ckpt", {"model": 3}, strict=False)),
    ]


# -- optimizer wrapper ---------------------------------------------------------------------------------------------------


@ask
def wrapped_optimizer() -> Any:
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    one = LightningOptimizer(plain)
    return [
        isinstance(one, torch.optim.SGD),
        type(one).__name__,
        one.optimizer is plain,
        one.param_groups[0]["lr"],
        attempt(lambda: one.step(closure=3)),
        attempt(lambda: type(copy.deepcopy(one)).__name__),
        attempt(lambda: pickle.loads(pickle.dumps(one)).param_groups[0]["lr"]),
        attempt(lambda: one.step()),
    ]
