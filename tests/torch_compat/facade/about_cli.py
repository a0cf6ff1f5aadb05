"""`LightningCLI`: command lines, configuration files, environment variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from about_modules import Data
from answering import ask, ask_each, attempt
from lightning.pytorch import callbacks as cb
from lightning.pytorch.cli import LightningCLI, instantiate_class
from lightning.pytorch.demos.boring_classes import BoringDataModule, RandomDataset
from models import QUIET, Net


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
            args=["--model=about_cli.Wide", "--model.width=3", "--data=about_cli.Data"],
            run=False,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_defaults=QUIET,
            save_config_callback=None,
        )
    ),
    cli_missing_subclass=lambda: LightningCLI(
        pl.LightningModule, args=["--model=about_cli.Nothing"], run=False, subclass_mode_model=True, trainer_defaults=QUIET
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
