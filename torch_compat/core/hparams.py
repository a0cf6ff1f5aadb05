"""Hyperparameters of a module or data module: collected from its ``__init__``, saved in checkpoints, given to loggers.

API: ``lightning.pytorch.core.mixins.HyperparametersMixin``.
"""

from __future__ import annotations

import copy
import inspect
import types
from argparse import Namespace
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

from torch import nn

from torch_compat.utilities.data import AttributeDict
from torch_compat.utilities.parsing import collect_init_args, given_values
from torch_compat.utilities.rank_zero import rank_zero_warn

__all__ = ["AttributeDict", "HyperparametersMixin"]

_PRIMITIVE_TYPES = (bool, int, float, str)
_CONSTRUCTOR_NAME = "kwargs"
"""Stored beside hyperparameters that are keyword arguments of ``__init__`` (else the name of the one argument they are)."""


class HyperparametersMixin:
    """The mixin that gives a class ``save_hyperparameters()``, ``hparams`` and ``hparams_initial``."""

    __jit_unused_properties__: ClassVar[list[str]] = ["hparams", "hparams_initial"]

    def __init__(self) -> None:
        super().__init__()
        self._log_hyperparams = False

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Saves arguments of ``__init__`` in ``self.hparams``; call it in ``__init__``.

        Without ``args`` all arguments are saved, ``**kwargs`` one by one and ``*args`` not at all; where classes that save
        derive from each other, or a module is made in another one's constructor, the arguments of all these constructors are
        saved, and the outermost's win. Arguments have the values that their names hold at the time of the call.

        ::

            class Net(pl.LightningModule):
                def __init__(self, width=8, lr=0.1):
                    super().__init__()
                    self.save_hyperparameters()
                    self.layer = torch.nn.Linear(32, self.hparams.width)

            assert Net(width=4).hparams == {"width": 4, "lr": 0.1}

        Args:
            *args: names of the arguments to save; or one object that *is* the hyperparameters (dict, ``Namespace`` or
                OmegaConf container).
            ignore: name or names not to save, and to remove where a base class has saved them.
            frame: the frame of the ``__init__`` to read; the caller's by default.
            logger: whether to send the hyperparameters to the loggers.

        Raises:
            KeyError: a name in ``args`` is not an argument of ``__init__``.
            ValueError: one object was given that is a number, a string or no mapping.
        """
        self._log_hyperparams = logger
        if len(args) == 1 and not args[0]:  # an empty container
            return
        given = given_values()
        arguments = _init_arguments(self, frame or _caller(inspect.currentframe())) if given is None else dict(given)
        ignored = _ignored_names(ignore)
        values, name = _select(arguments, args, ignored)
        self._hparams_name = name
        self._set_hparams(values)
        self.remove_ignored_hparams(sorted(ignored))
        self._warn_of_modules()
        self._hparams_initial = copy.deepcopy(self._hparams)

    def _warn_of_modules(self) -> None:
        for key, value in self._hparams.items():
            if isinstance(value, nn.Module):
                rank_zero_warn(
                    f"Attribute {key!r} is an instance of `nn.Module` and is already saved during checkpointing."
                    f" As a hyperparameter it is saved twice: `self.save_hyperparameters(ignore=[{key!r}])` leaves it out."
                )

    def _set_hparams(self, hp: MutableMapping[str, Any] | Namespace | str) -> None:
        """Merges ``hp`` into what is saved already, or replaces it where one of them is no plain dict."""
        converted = self._to_hparams_dict(hp)
        if isinstance(converted, dict) and isinstance(self.hparams, dict):
            self.hparams.update(converted)
        else:
            self._hparams = converted

    def remove_ignored_hparams(self, ignore_list: list[str]) -> None:
        """Removes the names in ``ignore_list`` from the saved hyperparameters, those of base classes too."""
        for name in ignore_list:
            if name in self.hparams:
                del self.hparams[name]

    @staticmethod
    def _to_hparams_dict(hp: Any) -> MutableMapping[str, Any] | AttributeDict:
        if isinstance(hp, Namespace):
            hp = vars(hp)
        if isinstance(hp, dict):
            return AttributeDict(hp)
        if isinstance(hp, _PRIMITIVE_TYPES):
            raise ValueError(
                f"Primitives {_PRIMITIVE_TYPES} are not allowed as hyperparameters: found {hp!r}."
                " Pass the names of `__init__` arguments, or one dict or Namespace."
            )
        if isinstance(hp, MutableMapping) or is_omegaconf(hp):
            return hp
        raise ValueError(f"Unsupported config type of {type(hp)}: expected a dict, a Namespace or an OmegaConf container.")

    @property
    def hparams(self) -> AttributeDict | MutableMapping[str, Any]:
        """The hyperparameters that ``save_hyperparameters`` saved: a dict with attribute access, which may be changed.

        Checkpoints store it.
        """
        if not hasattr(self, "_hparams"):
            self._hparams = AttributeDict()
        return self._hparams

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of the hyperparameters as they were saved first: for reading only."""
        if not hasattr(self, "_hparams_initial"):
            return AttributeDict()
        return copy.deepcopy(self._hparams_initial)  # pyright: ignore[reportReturnType]


def is_omegaconf(value: object) -> bool:
    """Whether ``value`` is an OmegaConf container, without importing that package."""
    return any(cls.__module__.startswith("omegaconf.") and cls.__name__ == "Container" for cls in type(value).__mro__)


def _caller(frame: types.FrameType | None) -> types.FrameType:
    if frame is None or frame.f_back is None:
        raise RuntimeError("`save_hyperparameters` needs Python stack frames; pass `frame=` explicitly.")
    return frame.f_back


def _init_arguments(obj: object, frame: types.FrameType) -> dict[str, Any]:
    """Arguments of the constructors that are running, those further out winning."""
    if is_dataclass(obj):
        return {field.name: getattr(obj, field.name) for field in fields(obj) if field.init}
    arguments: dict[str, Any] = {}
    for found in collect_init_args(frame, [], classes=(HyperparametersMixin,)):
        arguments.update(found)
    return arguments


def _ignored_names(ignore: Sequence[str] | str | None) -> set[str]:
    if ignore is None:
        return set()
    if isinstance(ignore, str):
        return {ignore}
    if not isinstance(ignore, Iterable):
        raise TypeError(f"`save_hyperparameters(ignore=...)` expects a name or a list of names, found {ignore!r}.")
    return set(ignore)


def _select(arguments: dict[str, Any], args: tuple[Any, ...], ignored: set[str]) -> tuple[Any, str | None]:
    """The hyperparameters, and the name under which ``__init__`` takes them back (None: it takes them by no name)."""
    arguments = {name: value for name, value in arguments.items() if name not in ignored}
    objects = [arg for arg in args if not isinstance(arg, str)]
    if not args:
        return arguments, _CONSTRUCTOR_NAME if arguments else None
    if len(objects) == 1:
        names = [name for name, value in arguments.items() if value is objects[0] or _equal(value, objects[0])]
        return objects[0], names[0] if names else None
    missing = [arg for arg in args if isinstance(arg, str) and arg not in arguments and arg not in ignored]
    if missing:
        raise KeyError(
            f"{missing[0]!r} is not an argument of `__init__`, so `save_hyperparameters` cannot save it:"
            f" expected one of {sorted(arguments)}."
        )
    return {arg: arguments[arg] for arg in args if isinstance(arg, str) and arg in arguments}, _CONSTRUCTOR_NAME


def _equal(left: Any, right: Any) -> bool:
    try:
        return type(left) is type(right) and bool(left == right)
    except (TypeError, ValueError, RuntimeError):
        return False
