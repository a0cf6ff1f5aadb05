"""``LightningCLI``. API: ``lightning.pytorch.cli.LightningCLI`` 2.6."""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, Union

import docstring_parser
import yaml
from jsonargparse import ActionConfigFile, Namespace  # pyright: ignore[reportPrivateImportUsage]  it is documented
from torch.optim import Optimizer

import torch_compat

# Imported for their classes: a short name on the command line is looked for among the subclasses that exist.
import torch_compat.accelerators
import torch_compat.callbacks
import torch_compat.loggers
import torch_compat.plugins
import torch_compat.profilers
import torch_compat.strategies
from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.overridden import is_overridden
from torch_compat.checkpoint.host_state import is_trusted
from torch_compat.cli.file_classes import FileClasses
from torch_compat.cli.instantiation import RememberingInstantiator, config_of, instantiate_class, returned_class
from torch_compat.cli.lr_scheduler import LRSchedulerTypeTuple, LRSchedulerTypeUnion, ReduceLROnPlateau
from torch_compat.cli.parser import AUTOMATIC, LightningArgumentParser
from torch_compat.cli.save_config import SaveConfigCallback
from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule
from torch_compat.core.saving import read_hyperparameters
from torch_compat.trainer.trainer import Trainer
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.seed import seed_everything
from xlatrain import __version__

ArgsType = Union[list[str], dict[str, Any], Namespace, None]  # noqa: UP007
"""What ``LightningCLI(args=…)`` accepts instead of the command line."""


class LightningCLI:
    """Parses a command line, makes model, data and Trainer from it, and runs one of the Trainer's methods.

    Configuration files (``--config``) and the command line may set every argument of their signatures; ``--print_config``
    shows the result. With ``parser_kwargs={"default_env": True}`` environment variables do too: ``PL_CONFIG``,
    ``PL_FIT__TRAINER__MAX_EPOCHS``. See https://lightning.ai/docs/pytorch/stable/cli/lightning_cli.html.

    Args:
        model_class: a LightningModule class, or a function that returns one; None: the configuration chooses.
        datamodule_class: the same for the LightningDataModule; with None none is needed.
        save_config_callback: writes the configuration to the log directory; None: nobody does.
        save_config_kwargs: arguments for it.
        trainer_class: a Trainer class, or a function that returns a Trainer.
        trainer_defaults: other defaults for the Trainer; its ``callbacks`` are always there, whatever the configuration says.
        seed_everything_default: default of ``--seed_everything``; True: a random seed, False: none.
        parser_kwargs: arguments for the parser; those under a subcommand's name, for that subcommand's.
        parser_class: class of the parsers.
        subclass_mode_model: whether the configuration may choose a subclass of ``model_class``.
        subclass_mode_data: the same for ``datamodule_class``.
        args: what to parse instead of ``sys.argv``: command line arguments, or a configuration.
        run: whether there are subcommands, one of which is run; False only makes the objects.
        auto_configure_optimizers: whether there are ``--optimizer`` and ``--lr_scheduler``.
        load_from_checkpoint_support: whether ``save_hyperparameters`` saves what the configuration says, so that
            ``load_from_checkpoint`` makes nested objects again.

    Attributes:
        config: what was parsed; ``config_init``: with objects in place of class paths.
        model, datamodule, trainer: what was made.
        subcommand: ``"fit"``, …; None with ``run=False``.
    """

    def __init__(
        self,
        model_class: type[LightningModule] | Callable[..., LightningModule] | None = None,
        datamodule_class: type[LightningDataModule] | Callable[..., LightningDataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: dict[str, Any] | dict[str, dict[str, Any]] | None = None,
        parser_class: type[LightningArgumentParser] = LightningArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.model_class = model_class
        self.datamodule_class = datamodule_class
        self._model_class = model_class or LightningModule
        self._datamodule_class = datamodule_class or LightningDataModule
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = save_config_kwargs or {}
        self.trainer_class = trainer_class
        self.trainer_defaults = trainer_defaults or {}
        self.seed_everything_default = seed_everything_default
        self.parser_kwargs = parser_kwargs or {}
        self.parser_class = parser_class
        self.auto_configure_optimizers = auto_configure_optimizers
        self.load_from_checkpoint_support = load_from_checkpoint_support

        main_kwargs, subparser_kwargs = self._setup_parser_kwargs(self.parser_kwargs)
        self.setup_parser(run, main_kwargs, subparser_kwargs)
        self.parse_arguments(self.parser, args)
        self._parse_ckpt_path()
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand:
            self._run_subcommand(self.subcommand)

    # -- the parser ------------------------------------------------------------------------------------------------

    def _setup_parser_kwargs(self, parser_kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of the main parser, and of each subcommand's."""
        names = self.subcommands().keys()
        main = {name: value for name, value in parser_kwargs.items() if name not in names}
        return main, {name: value for name, value in parser_kwargs.items() if name in names}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """An empty parser with ``--config``."""
        header = f"lightning.pytorch=={torch_compat.__version__} (torch_compat, xlatrain=={__version__})"
        parser = self.parser_class(**{"dump_header": [header], **kwargs})
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="A configuration file, YAML or JSON; later ones win.")
        return parser

    def setup_parser(self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]) -> None:
        """Make ``self.parser``, with subcommands or with the arguments themselves."""
        self.parser = self.init_parser(**main_kwargs)
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}
        self._subcommand_method_arguments: dict[str, list[str]] = {}
        if add_subcommands:
            self._add_subcommands(self.parser, **subparser_kwargs)
        else:
            self._add_arguments(self.parser)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--seed_everything``."""
        parser.add_argument(
            "--seed_everything",
            type=Union[bool, int],  # noqa: UP007
            default=self.seed_everything_default,
            help="Seed given to seed_everything before classes are instantiated. True: a random one; False: none.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the arguments of Trainer, model and data."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{name}": value for name, value in self.trainer_defaults.items() if name != "callbacks"}
        parser.set_defaults(defaults)
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=self.subclass_mode_model)
        parser.add_lightning_class_args(
            self._datamodule_class,
            "data",
            subclass_mode=self.subclass_mode_data,
            required=self.datamodule_class is not None,  # the model may have its own dataloaders
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Override to add arguments, or to link some (``parser.link_arguments``)."""

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        self.add_default_arguments_to_parser(parser)
        self.add_core_arguments_to_parser(parser)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser._optimizers:
                parser.add_optimizer_args((Optimizer,))
            if not parser._lr_schedulers:
                parser.add_lr_scheduler_args(LRSchedulerTypeTuple)
        self.link_optimizers_and_lr_schedulers(parser)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Methods of the Trainer that are subcommands, each with those of its arguments that the command line does not set."""
        evaluation = {"model", "dataloaders", "datamodule"}
        fit = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {"fit": fit, "validate": evaluation, "test": evaluation, "predict": evaluation}

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        subcommands = parser.add_subcommands()
        trainer_class = returned_class(self.trainer_class)
        for name in self.subcommands():
            summary = docstring_parser.parse(inspect.getdoc(getattr(trainer_class, name)) or "").short_description
            subparser = self._prepare_subcommand_parser(trainer_class, name, **{"description": summary, **kwargs.get(name, {})})
            subcommands.add_subcommand(name, subparser, help=summary)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = self.init_parser(**kwargs)
        self._add_arguments(parser)
        self._subcommand_method_arguments[subcommand] = parser.add_method_arguments(
            klass, subcommand, skip=set(self.subcommands()[subcommand])
        )
        self._subcommand_parsers[subcommand] = parser
        return parser

    @staticmethod
    def link_optimizers_and_lr_schedulers(parser: LightningArgumentParser) -> None:
        """Give optimizers and schedulers that were added with ``link_to`` to the arguments that it names."""
        for key, (cls, target) in {**parser._optimizers, **parser._lr_schedulers}.items():
            if target == AUTOMATIC:
                continue
            if isinstance(cls, tuple):
                parser.link_arguments(key, target)
            else:
                parser.link_arguments(key, target, compute_fn=partial(_with_class_path, cls))

    # -- parsing ---------------------------------------------------------------------------------------------------

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line, or what was given instead, into ``self.config``."""
        if args is not None and len(sys.argv) > 1:
            rank_zero_warn(
                "LightningCLI's args parameter is read instead of the command line, but both were given: the command line's"
                f" {sys.argv[1:]} is ignored; args={args}"
            )
        self.config: Any = parser.parse_object(args) if isinstance(args, dict | Namespace) else parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Take the model's arguments from the checkpoint that is loaded: they come before those of the command line."""
        subcommand = self.config.get("subcommand")
        options = self.config[subcommand] if subcommand else {}
        path, weights_only = options.get("ckpt_path"), options.get("weights_only")
        hyperparameters = read_hyperparameters(path, weights_only) if path else {}
        config = config_of(hyperparameters)
        if not config:
            return
        classes = None if is_trusted(weights_only) else FileClasses(str(path), self._model_class, self.config)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.nullcontext() if classes is None else classes.alone():
                self.config = self.parser.parse_object({subcommand: {"model": config}}, self.config)
        except SystemExit:
            sys.stderr.write(
                f"{said.getvalue()}Parsing of ckpt_path hyperparameters failed! "
                f"The hyperparameters stored in {path} do not fit this model, see above: expected those of {self._model_class}\n"
            )
            raise

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is False:
            return
        chosen = seed_everything(workers=True) if seed is True else seed_everything(seed, workers=True)
        (self.config[self.subcommand] if self.subcommand else self.config)["seed_everything"] = chosen

    def _parser(self, subcommand: str | None) -> LightningArgumentParser:
        return self.parser if subcommand is None else self._subcommand_parsers[subcommand]

    def _get(self, config: Namespace, key: str, default: Any = None) -> Any:
        """A value of the configuration, which may be that of a subcommand."""
        return config.get(str(self.subcommand), config).get(key, default)

    # -- objects ---------------------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Override to do something before objects are made."""

    def instantiate_classes(self) -> None:
        """Make the objects."""
        self.config_init = self.parser.instantiate(self.config, instantiators=self._instantiators())
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)
        self.trainer = self.instantiate_trainer()

    def after_instantiate_classes(self) -> None:
        """Override to do something after objects are made, before anything runs."""

    def _instantiators(self) -> list[tuple[Callable, type, bool]] | None:
        if not self.load_from_checkpoint_support:
            return None
        return [
            (RememberingInstantiator("model", self._plain_config), returned_class(self._model_class), self.subclass_mode_model),
            (
                RememberingInstantiator("data", self._plain_config),
                returned_class(self._datamodule_class),
                self.subclass_mode_data,
            ),
        ]

    def _plain_config(self) -> Mapping[str, Any]:
        """The configuration in plain values, those of links included."""
        if not hasattr(self, "config_dump"):
            text = self.parser.dump(self.config, skip_link_targets=False, skip_unset=False, format="yaml")
            plain = yaml.safe_load(text)
            self.config_dump: dict[str, Any] = plain[self.subcommand] if self.subcommand else plain
        return self.config_dump

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer from the configuration; ``kwargs`` come before it."""
        callbacks = [self._get(self.config_init, key) for key in self._parser(self.subcommand).callback_keys]
        config = {**self._get(self.config_init, "trainer", default={}), **kwargs}
        return self._instantiate_trainer(config, callbacks)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        if "callbacks" not in config:
            rank_zero_warn(
                f"The `{returned_class(self.trainer_class).__qualname__}` class does not expose the `callbacks` argument so"
                " they will not be included: give its constructor the argument."
            )
            return self.trainer_class(**config)
        config["callbacks"] = [
            *_as_list(config["callbacks"]),
            *callbacks,
            *_as_list(self.trainer_defaults.get("callbacks")),
        ]
        if self.save_config_callback is not None and not config.get("fast_dev_run", False):
            own_config = self.config.get(str(self.subcommand), self.config)
            parser = self._parser(self.subcommand)
            config["callbacks"].append(self.save_config_callback(parser, own_config, **self.save_config_kwargs))
        return self.trainer_class(**config)

    # -- optimizers ------------------------------------------------------------------------------------------------

    @staticmethod
    def configure_optimizers(
        lightning_module: LightningModule, optimizer: Optimizer, lr_scheduler: LRSchedulerTypeUnion | None = None
    ) -> Any:
        """The model's ``configure_optimizers`` when the command line chose an optimizer; override to return something else."""
        if lr_scheduler is None:
            return optimizer
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}}
        return [optimizer], [lr_scheduler]

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        if not self.auto_configure_optimizers:
            return
        parser = self._parser(subcommand)
        optimizers = _automatic(parser._optimizers)
        schedulers = _automatic(parser._lr_schedulers)
        if not optimizers:
            return
        if len(optimizers) > 1 or len(schedulers) > 1:
            raise MisconfigurationException(
                f"`{type(self).__name__}` makes `configure_optimizers` from at most one optimizer and one lr_scheduler, but"
                f" found {optimizers + schedulers}: add them with `link_to`, and implement `configure_optimizers` in the model."
            )
        optimizer_init = self._class_and_arguments(parser._optimizers[optimizers[0]][0], optimizers[0])
        if not optimizer_init:
            return  # nobody chose one
        scheduler_init = self._class_and_arguments(parser._lr_schedulers[schedulers[0]][0], schedulers[0]) if schedulers else None
        if is_overridden("configure_optimizers", self.model):
            rank_zero_warn(
                f"`{type(self.model).__name__}.configure_optimizers` will be overridden by"
                " the configuration; leave the optimizer out there to keep the module's."
            )
        optimizer = instantiate_class(self.model.parameters(), optimizer_init)
        scheduler = instantiate_class(optimizer, scheduler_init) if scheduler_init else None
        method = partial(self.configure_optimizers, optimizer=optimizer, lr_scheduler=scheduler)
        self.model.configure_optimizers = MethodType(update_wrapper(method, self.configure_optimizers), self.model)

    def _class_and_arguments(self, cls: type | tuple[type, ...], key: str) -> Any:
        chosen = self._get(self.config_init, key)
        return chosen if isinstance(cls, tuple) else _with_class_path(cls, chosen)

    # -- running ---------------------------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        """Call ``before_<subcommand>``, the subcommand (the CLI's own method, or the Trainer's), ``after_<subcommand>``."""
        self._call_if_there(f"before_{subcommand}")
        run = getattr(self, subcommand, None) or getattr(self.trainer, subcommand)
        run(**self._prepare_subcommand_kwargs(subcommand))
        self._call_if_there(f"after_{subcommand}")

    def _call_if_there(self, name: str) -> None:
        method = getattr(self, name, None)
        if callable(method):
            method()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        names = self._subcommand_method_arguments[subcommand]
        kwargs = {name: value for name, value in self.config_init[subcommand].items() if name in names}
        kwargs["model"] = self.model
        if self.datamodule is not None:
            kwargs["datamodule"] = self.datamodule
        return kwargs


def _with_class_path(cls: type, arguments: Namespace | Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(arguments, Namespace):
        arguments = arguments.as_dict()
    return {"class_path": f"{cls.__module__}.{cls.__name__}", "init_args": arguments or {}}


def _automatic(registered: Mapping[str, tuple[Any, str]]) -> list[str]:
    return [key for key, (_, target) in registered.items() if target == AUTOMATIC]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
