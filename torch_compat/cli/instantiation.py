"""Making objects from class paths and arguments, and modules that remember the arguments of the command line."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jsonargparse import ArgumentParser

from torch_compat.cli.file_classes import FileClasses
from torch_compat.utilities.parsing import given_hyperparameters

INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""Stored with the hyperparameters in checkpoints; stock Lightning looks it up by this name."""
_CLASS_PATH = "_class_path"

ModuleType = TypeVar("ModuleType")


def instantiate_class(args: Any | tuple[Any, ...], init: dict[str, Any]) -> Any:
    """An instance of ``init["class_path"]``.

    Args:
        args: positional arguments: one, or a tuple of them.
        init: ``{"class_path": "package.module.Class", "init_args": {…}}``.
    """
    module, _, name = init["class_path"].rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return cls(*(args if isinstance(args, tuple) else (args,)), **(init.get("init_args") or {}))


def instantiate_module(class_type: type, config: dict[str, Any], classes: FileClasses | None = None) -> Any:
    """A module or data module from the hyperparameters that a command line's run stored in its checkpoint.

    Args:
        class_type: the class that ``load_from_checkpoint`` was called on.
        config: its arguments as the configuration had them; with ``"_class_path"`` those of a subclass.
        classes: decides what may be imported and called; None: whatever is named.

    Raises:
        UntrustedValueError: ``classes`` does not allow what is named.
    """
    parser = ArgumentParser(exit_on_error=False)
    if _CLASS_PATH in config:
        parser.add_subclass_arguments(class_type, "module", fail_untyped=False)
        arguments = {name: value for name, value in config.items() if name != _CLASS_PATH}
        config = {"class_path": config[_CLASS_PATH], "dict_kwargs": arguments}
    else:
        parser.add_class_arguments(class_type, "module", fail_untyped=False)
    alone = contextlib.nullcontext if classes is None else classes.alone
    with alone():
        parsed = parser.parse_object({"module": config})
    with alone():
        return parser.instantiate(parsed).module


def hyperparameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a module as one flat dict, whether or not it names its class."""
    if "class_path" not in config:
        return dict(config)
    return {_CLASS_PATH: config["class_path"], **config.get("init_args", {}), **config.get("dict_kwargs", {})}


def config_of(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`hyperparameters_of`, for hyperparameters read from a checkpoint."""
    arguments = {name: value for name, value in hyperparameters.items() if name not in ("_instantiator", _CLASS_PATH)}
    if _CLASS_PATH in hyperparameters:
        return {"class_path": hyperparameters[_CLASS_PATH], "dict_kwargs": arguments}
    return arguments


class RememberingInstantiator:
    """Makes a module whose ``save_hyperparameters`` saves what the configuration says, not the objects made from it.

    Args:
        key: where the module is in the configuration: ``"model"`` or ``"data"``.
        config: called when a module is made; the whole configuration in plain values.
    """

    def __init__(self, key: str, config: Callable[[], Mapping[str, Any]]) -> None:
        self._key = key
        self._config = config

    def __call__(
        self, class_type: type, *args: Any, applied_instantiation_links: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        hyperparameters = hyperparameters_of(self._config().get(self._key) or {})
        for target, value in (applied_instantiation_links or {}).items():
            if target.startswith(f"{self._key}."):
                path = target.removeprefix(f"{self._key}.").removeprefix("init_args.").split(".")
                _set_at(hyperparameters, path, value)
        with given_hyperparameters({**hyperparameters, "_instantiator": INSTANTIATOR}):
            return class_type(*args, **kwargs)


def _set_at(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


def returned_class(source: Any) -> Any:
    """A class itself, or the class that a function's annotation says it returns (the parser has refused one that says none)."""
    return source if isinstance(source, type) else inspect.signature(source, eval_str=True).return_annotation
