"""Attributes and arguments by name (``lightning.pytorch.utilities.parsing``)."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch_compat.utilities.data import AttributeDict
from torch_compat.utilities.rank_zero import rank_zero_warn

__all__ = [
    "AttributeDict",
    "clean_namespace",
    "collect_init_args",
    "get_init_args",
    "is_picklable",
    "lightning_getattr",
    "lightning_hasattr",
    "lightning_setattr",
    "parse_class_init_keys",
    "save_hyperparameters",
]


def is_picklable(obj: object) -> bool:
    """Whether ``obj`` can be pickled."""
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, Any]) -> None:
    """Removes, with a warning each, the entries of ``hparams`` that cannot be pickled."""
    for key in [key for key, value in hparams.items() if not is_picklable(value)]:
        rank_zero_warn(
            f"Attribute '{key}' removed from hparams because it cannot be pickled: "
            f"`self.save_hyperparameters(ignore=['{key}'])` leaves it out without a word."
        )
        del hparams[key]


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Whether the module, its hyperparameters or its Trainer's data module have ``attribute``."""
    return bool(_holders(model, attribute))


def lightning_getattr(model: Any, attribute: str) -> Any:
    """``attribute`` of the first of data module, hyperparameters and module that has it; ``AttributeError`` if none has."""
    holder = _holders(model, attribute, required=True)[-1]
    return holder[attribute] if isinstance(holder, dict) else getattr(holder, attribute)


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Sets ``attribute`` wherever :func:`lightning_getattr` may look for it; ``AttributeError`` if none has it."""
    for holder in _holders(model, attribute, required=True):
        if isinstance(holder, dict):
            holder[attribute] = value
        else:
            setattr(holder, attribute, value)


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Names of the constructor's ``self``, ``*args`` and ``**kwargs``; None for those that it does not have."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())
    positional = next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), None)
    keyword = next((one.name for one in parameters if one.kind is one.VAR_KEYWORD), None)
    return parameters[0].name, positional, keyword


def get_init_args(frame: types.FrameType) -> dict[str, Any]:
    """The arguments of the constructor that runs in ``frame``; {} where none does."""
    return _get_init_args(frame)[1]


def _get_init_args(frame: types.FrameType) -> tuple[Any, dict[str, Any]]:
    """The object that is constructed in ``frame``, and the arguments: ``**kwargs`` one by one, ``*args`` left out."""
    info = inspect.getargvalues(frame)
    # Only a function that uses `super()` or `__class__` has it.
    if "__class__" not in info.locals or frame.f_code.co_name != "__init__":
        return None, {}
    cls = info.locals["__class__"]
    self_name, positional, keyword = parse_class_init_keys(cls)
    leave_out = {self_name, positional, keyword, "__class__", "frame", "frame_args"}
    names = inspect.signature(cls.__init__).parameters
    values = {name: info.locals[name] for name in names if name in info.locals and name not in leave_out}
    values.update(info.locals.get(keyword, {}) if keyword else {})
    return info.locals.get(self_name), values


def collect_init_args(
    frame: types.FrameType, path_args: list[dict[str, Any]], inside: bool = False, classes: tuple[type, ...] = ()
) -> list[dict[str, Any]]:
    """The arguments of the constructors that are running, from ``frame`` outwards.

    Args:
        frame: where to begin.
        path_args: those that were found already; they come first.
        inside: whether a constructor was found already: the first frame that is none then ends the search.
        classes: only of objects of these.
    """
    local_self, arguments = _get_init_args(frame) if "__class__" in frame.f_locals else (None, {})
    is_one = "__class__" in frame.f_locals and (not classes or isinstance(local_self, classes))
    if not isinstance(frame.f_back, types.FrameType) or (inside and not is_one):
        return path_args
    if is_one:
        path_args = [*path_args, arguments]
    return collect_init_args(frame.f_back, path_args, inside=inside or is_one, classes=classes)


_given: ContextVar[Mapping[str, Any] | None] = ContextVar("given_hyperparameters", default=None)


@contextlib.contextmanager
def given_hyperparameters(values: Mapping[str, Any]) -> Iterator[None]:
    """Let ``save_hyperparameters`` save these values in place of the arguments that ``__init__`` received.

    So a command line's configuration is saved as it was written, not as the objects made from it.
    """
    token = _given.set(values)
    try:
        yield
    finally:
        _given.reset(token)


def given_values() -> Mapping[str, Any] | None:
    """The values of :func:`given_hyperparameters`, in its block."""
    return _given.get()


def save_hyperparameters(
    obj: Any,
    *args: Any,
    ignore: Sequence[str] | str | None = None,
    frame: types.FrameType | None = None,
    given_hparams: dict[str, Any] | None = None,
) -> None:
    """Save hyperparameters for ``obj.save_hyperparameters(*args)``.

    See :meth:`~torch_compat.core.hparams.HyperparametersMixin.save_hyperparameters`.

    Args:
        obj: a module or data module.
        frame: of its constructor; the caller's by default.
        given_hparams: values to save in place of the constructor's arguments.

    Raises:
        TypeError: an object that has no hyperparameters.
    """
    if not callable(getattr(obj, "save_hyperparameters", None)):
        raise TypeError(
            f"save_hyperparameters({type(obj).__name__}): expected a LightningModule, a LightningDataModule or a class with the"
            " HyperparametersMixin"
        )
    if frame is None and (here := inspect.currentframe()) is not None:
        frame = here.f_back
    if given_hparams is None:
        obj.save_hyperparameters(*args, ignore=ignore, frame=frame)
        return
    with given_hyperparameters(given_hparams):
        obj.save_hyperparameters(*args, ignore=ignore, frame=frame)


def _lightning_get_all_attr_holders(model: Any, attribute: str) -> list[Any]:
    """The owners of ``attribute`` among module, hyperparameters and data module."""
    return _holders(model, attribute)


def _lightning_get_first_attr_holder(model: Any, attribute: str) -> Any | None:
    """The one that :func:`lightning_getattr` reads; None if there is none."""
    return next(reversed(_holders(model, attribute)), None)


def _holders(model: Any, attribute: str, required: bool = False) -> list[Any]:
    holders: list[Any] = [model] if hasattr(model, attribute) else []
    if not holders and hasattr(module := getattr(model, "jax_module", None), attribute):
        holders = [module]  # of a JaxModule, whose LightningModule has no attributes of the user's
    hparams = getattr(model, "hparams", None)
    if hparams is not None and (attribute in hparams if isinstance(hparams, dict) else hasattr(hparams, attribute)):
        holders.append(hparams)
    datamodule = getattr(getattr(model, "_trainer", None), "datamodule", None)
    if datamodule is not None and hasattr(datamodule, attribute):
        holders.append(datamodule)
    if attribute in (getattr(datamodule, "hparams", None) or {}):
        holders.append(datamodule.hparams)  # pyright: ignore[reportOptionalMemberAccess]
    if required and not holders:
        raise AttributeError(
            f"{attribute} is neither stored in the model namespace nor in its hparams nor on the datamodule: set it on "
            "one of them."
        )
    return holders
