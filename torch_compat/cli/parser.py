"""The parser of ``LightningCLI``. API: ``lightning.pytorch.cli.LightningArgumentParser``, on jsonargparse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jsonargparse import (
    ArgumentParser,
    Namespace,
    register_unresolvable_import_paths,
    set_parsing_settings,
)
from jsonargparse.typing import class_from_function
from torch.optim import Optimizer

from torch_compat.callbacks.callback import Callback
from torch_compat.cli.import_paths import as_imported
from torch_compat.cli.lr_scheduler import LRSchedulerType, LRSchedulerTypeTuple
from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule
from torch_compat.trainer.jax_modules import is_jax_class
from torch_compat.trainer.trainer import Trainer
from torch_compat.utilities.exceptions import MisconfigurationException

# Functions like `torch.nn.functional.relu` do not know their module; and configs may lie on any filesystem fsspec knows.
register_unresolvable_import_paths(torch)
set_parsing_settings(config_read_mode_fsspec_enabled=True)

AUTOMATIC = "AUTOMATIC"
"""Of an optimizer's or scheduler's arguments: ``configure_optimizers`` is made from them."""

_LIGHTNING_CLASSES = (Trainer, LightningModule, LightningDataModule, Callback)


class LightningArgumentParser(ArgumentParser):
    """A jsonargparse parser that knows what Trainer, modules, callbacks, optimizers and schedulers are.

    Args:
        *args: as for jsonargparse's ``ArgumentParser``.
        description: shown by ``--help``.
        env_prefix: environment variables are called ``<env_prefix>_TRAINER__MAX_EPOCHS`` and so on.
        default_env: whether to read them.
        **kwargs: as for jsonargparse's ``ArgumentParser``.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Lightning Trainer command line tool",
        env_prefix: str = "PL",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        self.callback_keys: list[str] = []
        self._optimizers: dict[str, tuple[type | tuple[type, ...], str]] = {}
        self._lr_schedulers: dict[str, tuple[type | tuple[type, ...], str]] = {}

    def add_lightning_class_args(
        self,
        lightning_class: type[Trainer | LightningModule | LightningDataModule | Callback]
        | Callable[..., Trainer | LightningModule | LightningDataModule | Callback],
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a class, or of a function that returns an instance, under ``nested_key``.

        A callback added this way is always in the Trainer, configured from the command line.

        Args:
            lightning_class: a Trainer, LightningModule, LightningDataModule or Callback class, or such a function.
            nested_key: where they are in the configuration, e.g. ``"model"``.
            subclass_mode: whether the configuration chooses among subclasses, by class path.
            required: in subclass mode: whether it must choose one.

        Returns:
            Names of the arguments added.

        Raises:
            MisconfigurationException: ``lightning_class`` is none of these.
        """
        found: Any = lightning_class
        if callable(found) and not isinstance(found, type):
            found = class_from_function(found)
        if not (isinstance(found, type) and (issubclass(found, _LIGHTNING_CLASSES) or is_jax_class(found))):
            raise MisconfigurationException(
                f"Cannot add arguments from: {lightning_class}. Expected a Trainer, LightningModule, "
                "LightningDataModule or Callback class, or a function that returns such an object."
            )
        if issubclass(found, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            added: Any = self.add_subclass_arguments(found, nested_key, fail_untyped=False, required=required)
            return added
        is_trainer = issubclass(found, Trainer)  # made last, when its callbacks are known
        return self.add_class_arguments(found, nested_key, fail_untyped=False, instantiate=not is_trainer, sub_configs=True)

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of an optimizer class under ``nested_key``.

        Args:
            optimizer_class: one class; or a tuple, of which, with their subclasses, the configuration chooses.
            nested_key: where they are in the configuration.
            link_to: a key that gets them as class path and arguments, for :func:`instantiate_class`; or ``"AUTOMATIC"``.

        Raises:
            TypeError: no subclass of ``torch.optim.Optimizer``.
        """
        self._add_class_or_choice(optimizer_class, (Optimizer,), nested_key, skip="params")
        self._optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: LRSchedulerType | tuple[LRSchedulerType, ...] = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of a learning-rate scheduler class under ``nested_key``; as :meth:`add_optimizer_args`.

        Raises:
            TypeError: no subclass of ``LRScheduler`` or of this package's ``ReduceLROnPlateau``.
        """
        self._add_class_or_choice(lr_scheduler_class, LRSchedulerTypeTuple, nested_key, skip="optimizer")
        self._lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_class_or_choice(self, classes: Any, bases: tuple[type, ...], nested_key: str, skip: str) -> None:
        for one in classes if isinstance(classes, tuple) else (classes,):
            if not (isinstance(one, type) and issubclass(one, bases)):
                expected = " or ".join(base.__name__ for base in bases)
                raise TypeError(f"arguments {nested_key!r}: expected a subclass of {expected}, found {one!r}")
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": {skip}}
        if isinstance(classes, tuple):
            self.add_subclass_arguments(classes, nested_key, **options)
        else:
            self.add_class_arguments(classes, nested_key, sub_configs=True, **options)

    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        """The configuration as text, with import paths that stock Lightning understands too."""
        return as_imported(super().dump(namespace, *args, **kwargs))
