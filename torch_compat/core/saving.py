"""Making modules and data modules from checkpoints, and hyperparameter files (``lightning.pytorch.core.saving``)."""

from __future__ import annotations

import ast
import copy
import csv
import functools
import inspect
import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from warnings import warn

import fsspec
import torch
import yaml
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from torch_compat.checkpoint.host_state import UnreadableCheckpointError, is_trusted, named_if_unreadable
from torch_compat.utilities.data import AttributeDict
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.checkpoint import check_body, wait_for_save

if TYPE_CHECKING:
    from torch_compat.core.datamodule import LightningDataModule
    from torch_compat.core.module import LightningModule

MapLocation = (
    torch.device
    | str
    | int
    | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    | dict[torch.device | str | int, torch.device | str | int]
    | None
)

# What `LightningModule`s of 0.x wrote under other keys.
PAST_HYPER_PARAMS_KEYS = ("hparams", "module_arguments")


# ---- reading


def read_checkpoint(
    path: str | Path | IO[bytes], map_location: MapLocation = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """A checkpoint in Lightning's dict layout, whatever its format.

    Args:
        path: one of our checkpoint directories; a ``.ckpt`` file of stock Lightning, also on a remote filesystem that ``fsspec``
            knows; or a file object.
        map_location: as for ``torch.load``. By default tensors saved on a device that torch lacks here come to the CPU.
        weights_only: as for ``torch.load``, whose default (None) is True: nothing is unpickled that could run code.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        TypeError: ``path`` holds something else than a dict; or ``map_location`` is a function, for a directory.
        pickle.UnpicklingError: the checkpoint holds what the safe loader does not read.
        CorruptCheckpointError: it is ours, and not what was committed.
        UnreadableCheckpointError: the file is empty, cut off or something else.
    """
    if isinstance(path, (str, os.PathLike)):
        wait_for_save(path)
        if _is_directory(path):
            from torch_compat.checkpoint.checkpoint_dict import load_checkpoint_dict

            return _moved(load_checkpoint_dict(path, weights_only=weights_only is not False), map_location)
        with fsspec.open(str(path), "rb") as file:
            check_body(str(path), file)  # pyright: ignore[reportArgumentType]
            file.seek(0)  # pyright: ignore[reportAttributeAccessIssue]
            return _torch_load(file, str(path), map_location, weights_only)  # pyright: ignore[reportArgumentType]
    return _torch_load(path, getattr(path, "name", repr(path)), map_location, weights_only)


def read_hyperparameters(path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """The hyperparameters stored in a checkpoint; {} where there is not a checkpoint, or none were saved."""
    from torch_compat.core.module import LightningModule

    key = LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
    if _is_directory(path):
        from torch_compat.checkpoint.checkpoint_dict import load_checkpoint_dict

        return dict(load_checkpoint_dict(path, weights_only, lazy=True).get(key) or {})
    return dict(read_checkpoint(path, weights_only=weights_only).get(key) or {}) if os.path.isfile(path) else {}


def _moved(checkpoint: dict[str, Any], map_location: MapLocation) -> dict[str, Any]:
    """A checkpoint whose tensors, all on the CPU, go where ``map_location`` says."""
    if map_location is None:
        return checkpoint
    if isinstance(map_location, dict):
        map_location = map_location.get("cpu", "cpu")
    if callable(map_location):
        raise TypeError(
            "A function as `map_location` is called with torch's storages, which a checkpoint directory does not have:"
            " pass a device, such as `map_location='cpu'`."
        )
    return apply_to_collection(checkpoint, Tensor, lambda tensor: tensor.to(map_location))


def _is_directory(path: str | os.PathLike[str]) -> bool:
    text = os.fspath(path)
    if "://" not in text:
        return os.path.isdir(text)
    if text.startswith(("http://", "https://")):
        return False
    filesystem, inner = fsspec.url_to_fs(text)
    return filesystem.isdir(inner)


def _torch_load(file: IO[bytes], name: str, map_location: MapLocation, weights_only: bool | None) -> dict[str, Any]:
    try:
        with named_if_unreadable(file, repr(name)):
            checkpoint = torch.load(
                file,
                map_location=_to_existing_device if map_location is None else map_location,  # pyright: ignore[reportArgumentType]
                weights_only=weights_only,
            )
    except pickle.UnpicklingError as error:
        if weights_only is False or isinstance(error, UnreadableCheckpointError):
            raise
        raise pickle.UnpicklingError(
            f"The checkpoint {name!r} holds objects that are not loaded by default, because loading them can run code"
            f" that is in the file: {_unsafe_global(error)}. If you trust its source, pass `weights_only=False`;"
            " or allow the named class with `torch.serialization.add_safe_globals([...])`."
        ) from error
    if not isinstance(checkpoint, dict):
        raise TypeError(f"{name!r} is not a checkpoint: expected a dict, found {type(checkpoint).__name__}.")
    return checkpoint


def _unsafe_global(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "WeightsUnpickler error" in line]
    return lines[0] if lines else str(error)


def _to_existing_device(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """The device to load a storage on: None (torch's default) for devices that torch has here; else the storage, on the CPU."""
    kind = location.split(":")[0]
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        return None
    if kind == "mps" and torch.backends.mps.is_available():
        return None
    return storage if kind in ("cuda", "mps", "xla", "hpu", "xpu") else None


# ---- making modules


def load_from_checkpoint(
    cls: type[LightningModule] | type[LightningDataModule],
    checkpoint_path: str | Path | IO[bytes],
    map_location: MapLocation = None,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> LightningModule | LightningDataModule:
    """The implementation of ``load_from_checkpoint`` of modules and data modules; see there."""
    from torch_compat.core.module import LightningModule

    checkpoint = read_checkpoint(checkpoint_path, map_location, weights_only)
    key = cls.CHECKPOINT_HYPER_PARAMS_KEY
    if hparams_file is not None:
        checkpoint[key] = _read_hparams(hparams_file)
    checkpoint[key] = {**_saved_hparams(checkpoint, key), **kwargs}
    instantiator = checkpoint[key].pop("_instantiator", None)
    trusted = is_trusted(weights_only)
    arguments = _init_kwargs(cls, checkpoint, kwargs, trusted)
    obj = _make(cls, instantiator, arguments, None if trusted else (checkpoint_path, kwargs))
    if not isinstance(obj, LightningModule):
        name = type(obj).__qualname__
        if name in checkpoint:
            obj.load_state_dict(checkpoint[name])
        return obj
    _restore_module(obj, checkpoint, strict)
    state_dict = weights_of(checkpoint)
    if not state_dict:
        rank_zero_warn(f"The state dict in {checkpoint_path!r} contains no parameters: the module keeps its own.")
        return obj
    first = next((value for value in state_dict.values() if isinstance(value, Tensor)), torch.tensor(0))
    return obj.to(first.device)


_INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")


def _make(cls: type, instantiator: str | None, arguments: dict[str, Any], untrusted: tuple[Any, Mapping[str, Any]] | None) -> Any:
    """An instance; made as ``LightningCLI`` makes it where the hyperparameters are those of a command line.

    ``untrusted``: the file that the arguments come from, and those of them that the caller gave; None: it may run code.
    """
    if instantiator is None:
        return cls(**arguments)
    if instantiator not in _INSTANTIATORS:  # importing what a file names would run it
        raise ValueError(
            f"The checkpoint wants {cls.__name__} to be made by {instantiator!r}; known: {', '.join(_INSTANTIATORS)}."
            " Make the module yourself and load `torch.load(…)['state_dict']` into it."
        )
    from torch_compat.cli.file_classes import FileClasses
    from torch_compat.cli.instantiation import instantiate_module

    return instantiate_module(cls, arguments, FileClasses(_name(untrusted[0]), cls, untrusted[1]) if untrusted else None)


def _name(source: str | Path | IO[bytes]) -> str:
    return repr(os.fspath(source) if isinstance(source, str | os.PathLike) else getattr(source, "name", source))


def _read_hparams(path: str | Path) -> dict[str, Any]:
    extension = str(path).split(".")[-1].lower()
    if extension == "csv":
        return load_hparams_from_tags_csv(path)
    if extension in ("yml", "yaml"):
        return load_hparams_from_yaml(path)
    raise ValueError(f".csv, .yml or .yaml is required for `hparams_file`, found {str(path)!r}")


def _saved_hparams(checkpoint: Mapping[str, Any], key: str) -> dict[str, Any]:
    saved: dict[str, Any] = {}
    for past_key in PAST_HYPER_PARAMS_KEYS:
        saved.update(checkpoint.get(past_key) or {})
    saved.update(checkpoint.get(key) or {})
    return saved


def _init_kwargs(cls: Any, checkpoint: Mapping[str, Any], overrides: Mapping[str, Any], trusted: bool) -> dict[str, Any]:
    """Keyword arguments for ``cls``: the saved ones that its ``__init__`` takes, and the overrides."""
    parameters = inspect.signature(cls.__init__).parameters
    saved = _convert(checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY], checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_TYPE), trusted)
    name: str = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME) or ""
    kinds = {parameter.kind for parameter in parameters.values()}
    if name in parameters and parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
        arguments = {name: saved}
    else:
        arguments = dict(saved)
    arguments.update(overrides)
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return arguments
    names = list(parameters)[1:]
    return {key: value for key, value in arguments.items() if key in names}


def _convert(hparams: Mapping[str, Any], kind: Any, trusted: bool) -> Any:
    """Hyperparameters in the container type that they were saved from (``hparams_type``), if it can be made from a mapping."""
    if kind is None or not (trusted or _is_container(kind)):  # what a file names would be called
        return hparams
    try:
        return kind(hparams)
    except TypeError:
        return hparams


def _is_container(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Mapping | Namespace)


def weights_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``state_dict`` in a checkpoint.

    Raises:
        KeyError: there is none; names what is there.
    """
    if "state_dict" not in checkpoint:
        found = ", ".join(repr(key) for key in [*checkpoint][:5]) or "nothing"
        raise KeyError(
            f"the checkpoint has no 'state_dict', only {found}{', …' if len(checkpoint) > 5 else ''}: it is not one of "
            "Lightning's. If it holds weights alone, load them by hand: module.load_state_dict(torch.load(path))"
        )
    return checkpoint["state_dict"]


def _restore_module(module: LightningModule, checkpoint: dict[str, Any], strict: bool | None) -> None:
    from torch_compat.core.hooks import ModelHooks

    if strict is None:
        strict = module.strict_loading
    elif module._strict_loading is not None and strict != module.strict_loading:
        raise ValueError(
            f"You set `.load_from_checkpoint(..., strict={strict!r})` which is in conflict with"
            f" `{type(module).__name__}.strict_loading={module.strict_loading!r}`: leave one of them out."
        )
    if type(module).configure_model is not ModelHooks.configure_model:
        module.configure_model()
    module.on_load_checkpoint(checkpoint)
    result = module.load_state_dict(weights_of(checkpoint), strict=strict)
    # An override of `load_state_dict` may return nothing.
    if strict or result is None:
        return
    if result.missing_keys:
        rank_zero_warn(f"Found keys that are in the model state dict but not in the checkpoint: {result.missing_keys}")
    if result.unexpected_keys:
        rank_zero_warn(f"Found keys that are not in the model state dict but in the checkpoint: {result.unexpected_keys}")


# ---- hyperparameter files


def update_hparams(hparams: dict[str, Any], updates: dict[str, Any]) -> None:
    """Merges ``updates`` into ``hparams`` in place, nested dicts entry by entry."""
    for key, value in updates.items():
        if isinstance(value, dict) and isinstance(hparams.get(key), dict):
            update_hparams(hparams[key], value)
        else:
            hparams[key] = value


def load_hparams_from_tags_csv(tags_csv: str | Path) -> dict[str, Any]:
    """Hyperparameters from a csv file of ``key,value`` rows; numbers, bools and literals are converted; {} without the file."""
    if not os.path.isfile(tags_csv):
        warn(f"Missing Tags: {tags_csv}.", category=RuntimeWarning, stacklevel=2)
        return {}
    with open(tags_csv, newline="") as file:
        return {row["key"]: convert(row["value"]) for row in csv.DictReader(file)}


def save_hparams_to_tags_csv(tags_csv: str | Path, hparams: dict[str, Any] | Namespace) -> None:
    """Writes hyperparameters as ``key,value`` rows; ``RuntimeError`` if the folder does not exist."""
    _need_folder(tags_csv)
    values = vars(hparams) if isinstance(hparams, Namespace) else hparams
    with open(tags_csv, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["key", "value"])
        writer.writeheader()
        writer.writerows({"key": key, "value": value} for key, value in values.items())


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> dict[str, Any]:
    """Hyperparameters from a YAML file; {} and a warning without the file.

    With ``use_omegaconf`` and OmegaConf installed, values with interpolations come back as OmegaConf containers.
    """
    filesystem, path = fsspec.url_to_fs(str(config_yaml))
    if not filesystem.exists(path):
        warn(f"Missing Tags: {config_yaml}.", category=RuntimeWarning, stacklevel=2)
        return {}
    with filesystem.open(path, "r") as file:
        hparams = yaml.full_load(file)
    omegaconf = _omegaconf() if use_omegaconf else None
    if omegaconf is None:
        return hparams
    try:
        return omegaconf.OmegaConf.create(hparams)
    except (omegaconf.errors.UnsupportedValueType, omegaconf.errors.ValidationError):
        return hparams


def save_hparams_to_yaml(config_yaml: str | Path, hparams: dict[str, Any] | Namespace, use_omegaconf: bool = True) -> None:
    """Writes hyperparameters to a YAML file, with OmegaConf where that is installed and takes them all.

    An enum is written by its name, other objects with YAML's tags for Python (which :func:`load_hparams_from_yaml` does not make
    objects of). A value that YAML cannot write is left out with a warning.

    Raises:
        RuntimeError: the folder does not exist.
        TypeError: ``hparams`` is no dict or Namespace.
    """
    _need_folder(config_yaml)
    values = vars(hparams) if isinstance(hparams, Namespace) else hparams
    values = dict(values) if isinstance(values, AttributeDict) else values
    omegaconf = _omegaconf() if use_omegaconf else None
    if omegaconf is not None:
        from omegaconf.errors import UnsupportedValueType, ValidationError  # pyright: ignore[reportMissingImports]

        container = functools.partial(omegaconf.OmegaConf.to_container, resolve=True)
        resolved = apply_to_collection(copy.deepcopy(values), omegaconf.DictConfig, container)
        with fsspec.open(str(config_yaml), "w", encoding="utf-8") as file:
            try:
                omegaconf.OmegaConf.save(resolved, file)
                return
            except (UnsupportedValueType, ValidationError):
                pass
        values = resolved
    if not isinstance(values, dict):
        raise TypeError(f"hparams must be dictionary, found {type(hparams).__name__}")
    named = {key: value.name if isinstance(value, Enum) else value for key, value in values.items()}
    with fsspec.open(str(config_yaml), "w", newline="") as file:
        file.write(yaml.dump({key: value for key, value in named.items() if _is_yaml(key, value)}))  # pyright: ignore[reportAttributeAccessIssue]


def _is_yaml(key: str, value: Any) -> bool:
    try:
        yaml.dump(value)
    except (TypeError, ValueError):
        warn(f"Skipping '{key}' parameter because it is not possible to safely dump to YAML.", stacklevel=3)
        return False
    return True


def _need_folder(path: str | Path) -> None:
    filesystem, inner = fsspec.url_to_fs(str(path))
    folder = os.path.dirname(inner)
    if folder and not filesystem.isdir(folder):
        raise RuntimeError(f"Missing folder: {os.path.dirname(str(path))}.")


def _omegaconf() -> Any | None:
    try:
        import omegaconf  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return omegaconf


def convert(val: str) -> Any:
    """A Python literal, ``true`` or ``false`` in any case, or else the text itself."""
    lowered = val.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    try:
        return ast.literal_eval(val)
    except (SyntaxError, ValueError):
        return val
