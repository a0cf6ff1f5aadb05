"""`LightningCLI`: the same command lines give the same configuration files, hyperparameters, losses and errors."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from cli_models import Data, Injected, Net, WiderNet
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, ReduceLROnPlateau, SaveConfigCallback
from recording import Run, StepRecorder, case, main

SEED = 7


def command_line(placed: Run, *args: str, model: Any = Net, data: Any = Data, cls: Any = LightningCLI, **options: Any) -> Any:
    """The CLI of ``python script.py args…``, placed as the run wants it."""
    trainer = {
        "accelerator": "cpu",
        "devices": placed.devices,
        "num_nodes": placed.nodes,
        "strategy": placed.strategy,
        "default_root_dir": str(placed.root),
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": StepRecorder(placed),
    }
    chosen = ["--data=cli_models.Data"] if data is None else []
    rows = [f"--data.batch_size={placed.batch_size}"] if args and args[0] in LightningCLI.subcommands() else []
    sys.argv[1:] = [*args, *chosen, *rows]
    return cls(model, data, trainer_defaults=trainer, seed_everything_default=SEED, **options)


def note_config(run: Run, text: str, name: str = "config") -> None:
    """Write down a configuration file, without what the run's placement decides."""
    config = yaml.safe_load(text)
    for key in ("devices", "strategy", "num_nodes", "default_root_dir"):
        config["trainer"].pop(key)
    if logger := config["trainer"]["logger"]:
        logger["init_args"].pop("save_dir")
    (config["data"].get("init_args") or config["data"]).pop("batch_size")
    run.note(name, config)


@contextlib.contextmanager
def printed() -> Any:
    """The output, and how the program ends."""
    result: dict[str, Any] = {"text": "", "status": None}
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            yield result
    except SystemExit as end:
        result["status"] = end.code
    finally:
        result["text"] = stdout.getvalue()


def csv_logger(run: Run) -> list[str]:
    return ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={run.root}"]


@case
def everything_by_short_names(run: Run) -> None:
    optimizer = ["--optimizer=Adam", "--optimizer.lr=0.01", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"]
    stopping = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss", "--trainer.callbacks.patience=9"]
    activation = ["--model.activation=torch.nn.Tanh", "--model.width=6"]
    cli = command_line(run, "fit", *optimizer, *stopping, *activation, *csv_logger(run))
    run.finish(cli.model, cli.trainer)
    folder = run.root / "lightning_logs" / "version_0"
    note_config(run, (folder / "config.yaml").read_text())
    run.note("hparams", yaml.safe_load((folder / "hparams.yaml").read_text()))
    run.note("callbacks", [type(callback).__name__ for callback in cli.trainer.callbacks])
    assert any(isinstance(callback, EarlyStopping) for callback in cli.trainer.callbacks)


@case
def configuration_files(run: Run) -> None:
    first, second = run.root / "first.yaml", run.root / "second.yaml"
    first.write_text("model:\n  width: 5\n  lr: 0.02\ntrainer:\n  max_epochs: 1\n  gradient_clip_val: 0.5\n")
    second.write_text("model:\n  lr: 0.03\noptimizer:\n  class_path: torch.optim.SGD\n  init_args:\n    lr: 0.05\n")
    files = [f"--config={first}", f"--config={second}"]
    with printed() as print_config:
        command_line(run, "fit", *files, "--model.n_features=4", "--print_config")
    run.note("status", print_config["status"])
    note_config(run, print_config["text"])
    cli = command_line(run, "fit", *files, "--trainer.logger=false")
    run.finish(cli.model, cli.trainer)
    note_config(run, (run.root / "config.yaml").read_text(), "saved")
    # What was saved is a configuration file again, and another run does not overwrite it.
    try:
        command_line(run, "fit", f"--config={run.root / 'config.yaml'}")
    except RuntimeError as error:
        run.note("second run", "to NOT exist" in str(error))
    again = command_line(
        run,
        "fit",
        f"--config={run.root / 'config.yaml'}",
        save_config_kwargs={"overwrite": True, "config_filename": "other.yaml"},
    )
    run.note("third run", [(run.root / "other.yaml").exists(), again.model.hparams.width])


@case
def classes_chosen_on_the_command_line(run: Run) -> None:
    cli = command_line(run, "fit", "--model=cli_models.WiderNet", "--model.factor=3", *csv_logger(run), model=None, data=None)
    run.finish(cli.model, cli.trainer)
    folder = run.root / "lightning_logs" / "version_0"
    note_config(run, (folder / "config.yaml").read_text())
    run.note("hparams.yaml", yaml.safe_load((folder / "hparams.yaml").read_text()))
    run.note("hparams", dict(cli.model.hparams))
    path = cli.trainer.checkpoint_callback.best_model_path
    loaded = pl.LightningModule.load_from_checkpoint(path)
    assert type(loaded) is WiderNet
    run.note("loaded", [type(loaded).__name__, dict(loaded.hparams), loaded.net[0].weight])
    run.note("loaded otherwise", WiderNet.load_from_checkpoint(path, factor=3).net[0].weight)


@case
def checkpoints_know_their_arguments(run: Run) -> None:
    cli = command_line(run, "fit", "--model.width=6", "--model.activation=torch.nn.Tanh")
    path = cli.trainer.checkpoint_callback.best_model_path
    loaded = Net.load_from_checkpoint(path)
    run.note("loaded", [type(loaded.net[1]).__name__, sorted(loaded.hparams), type(loaded.hparams.activation).__name__])
    for subcommand in ("test", "predict"):
        cli = command_line(run, subcommand, f"--ckpt_path={path}", "--model.width=9", save_config_callback=None)
        run.note(subcommand, [cli.model.hparams.width, type(cli.model.net[1]).__name__])
        if subcommand == "test":
            run.finish(cli.model, cli.trainer)
    plain = command_line(run, "fit", "--model.width=3", load_from_checkpoint_support=False, save_config_callback=None)
    run.note("plain", dict(plain.model.hparams))


class Linked(LightningCLI):
    """Adds arguments, links some, and forces a callback."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--notes", type=str, default="none")
        parser.link_arguments("data.n_features", "model.n_features")
        parser.link_arguments("data.width", "model.width", apply_on="instantiate")
        parser.add_lightning_class_args(EarlyStopping, "stopping")
        parser.set_defaults({"stopping.monitor": "val_loss", "stopping.patience": 5})
        parser.add_optimizer_args(torch.optim.Adam)
        parser.add_lr_scheduler_args(ReduceLROnPlateau)

    def before_instantiate_classes(self) -> None:
        self.called = ["before_instantiate_classes", self.config[self.subcommand]["notes"]]

    def after_instantiate_classes(self) -> None:
        self.called.append("after_instantiate_classes")

    def before_fit(self) -> None:
        self.called.append("before_fit")

    def after_fit(self) -> None:
        self.called.append("after_fit")


@case
def linked_arguments_and_own_ones(run: Run) -> None:
    arguments = ["--data.n_features=3", "--notes=x", "--optimizer.lr=0.02", "--lr_scheduler.monitor=val_loss"]
    cli = command_line(run, "fit", *arguments, "--stopping.mode=min", "--lr_scheduler.patience=0", cls=Linked)
    run.finish(cli.model, cli.trainer)
    run.note("called", cli.called)
    run.note("width", [cli.model.hparams.width, cli.model.net[0].weight.shape])
    run.note("hparams", dict(cli.model.hparams))
    run.note("callbacks", [type(callback).__name__ for callback in cli.trainer.callbacks])
    run.note("scheduler", [type(config.scheduler).__name__ for config in cli.trainer.lr_scheduler_configs])


class TwoOptimizers(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args(torch.optim.Adam, nested_key="one")
        parser.add_optimizer_args(torch.optim.SGD, nested_key="two")


class Halved(LightningCLI):
    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        for group in optimizer.param_groups:
            group["lr"] /= 2
        return optimizer


@case
def optimizers(run: Run) -> None:
    cli = command_line(run, "fit", "--optimizer=SGD", "--optimizer.lr=0.1", cls=Halved, save_config_callback=None)
    run.finish(cli.model, cli.trainer)
    functions = ["--model.optimizer=Adam", "--model.optimizer.lr=0.03", "--model.scheduler=ExponentialLR"]
    injected = command_line(
        run, "fit", *functions, "--model.scheduler.gamma=0.5", model=Injected, save_config_callback=None,
        auto_configure_optimizers=False,
    )  # fmt: skip
    run.note("injected", [type(injected.trainer.optimizers[0]).__name__, injected.trainer.callback_metrics["train_loss"]])
    try:
        command_line(run, "fit", cls=TwoOptimizers)
    except Exception as error:
        run.note("two", type(error).__name__)


@case
def without_subcommands(run: Run) -> None:
    cli = command_line(run, run=False, save_config_callback=None)
    run.note("made", [type(cli.model).__name__, cli.subcommand, cli.trainer.max_epochs, cli.config["seed_everything"]])
    cli.datamodule.batch_size = run.batch_size
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    run.finish(cli.model, cli.trainer)


@case
def environment_variables(run: Run) -> None:
    variables = {"PL_FIT__MODEL__WIDTH": "7", "PL_FIT__TRAINER__MAX_EPOCHS": "1"}
    os.environ.update(variables)
    try:
        cli = command_line(run, "fit", "--model.lr=0.2", parser_kwargs={"default_env": True}, save_config_callback=None)
    finally:
        for name in variables:
            del os.environ[name]
    run.note("width", [cli.model.hparams.width, cli.trainer.max_epochs])
    run.finish(cli.model, cli.trainer)


class Elsewhere(SaveConfigCallback):
    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        (trainer.log_dir and os.makedirs(trainer.log_dir, exist_ok=True))
        with open(os.path.join(str(trainer.log_dir), "elsewhere.txt"), "w") as file:
            file.write(self.config_filename + stage)


@case
def saved_elsewhere(run: Run) -> None:
    options = {"save_config_callback": Elsewhere, "save_config_kwargs": {"save_to_log_dir": False}}
    cli = command_line(run, "fit", "--trainer.logger=false", "--trainer.max_epochs=1", **options)
    run.finish(cli.model, cli.trainer)
    files = sorted(path.name for path in run.root.iterdir() if path.suffix in (".txt", ".yaml"))
    run.note("files", [files, (run.root / "elsewhere.txt").read_text()])
    try:
        SaveConfigCallback(cli.parser, cli.config, save_to_log_dir=False)
    except ValueError as error:
        run.note("nothing saved", type(error).__name__)


@case
def mistakes(run: Run) -> None:
    for name, arguments in {
        "unknown argument": ["fit", "--model.widht=3"],
        "wrong type": ["fit", "--trainer.max_epochs=many"],
        "unknown class": ["fit", "--trainer.callbacks=EarlyStoppin"],
        "no subclass": ["fit", "--optimizer=torch.nn.Linear"],
        "no subcommand": ["train"],
    }.items():
        with printed() as result:
            command_line(run, *arguments)
        run.note(name, result["status"])
    try:
        LightningArgumentParser().add_lightning_class_args(dict, "dict")
    except Exception as error:
        run.note("no lightning class", type(error).__name__)
    with printed() as help_text:
        command_line(run, "fit", "--help")
    run.note("help", [help_text["status"], "--model.width" in help_text["text"], "hidden units" in help_text["text"]])


if __name__ == "__main__":
    main()
