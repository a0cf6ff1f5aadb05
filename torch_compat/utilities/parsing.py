"""Attributes and arguments by name (``lightning.pytorch.utilities.parsing``)."""

from __future__ import annotations

import pickle
from collections.abc import MutableMapping
from typing import Any

from torch_compat.utilities.data import AttributeDict
from torch_compat.utilities.rank_zero import rank_zero_warn

__all__ = [
    "AttributeDict",
    "clean_namespace",
    "is_picklable",
    "lightning_getattr",
    "lightning_hasattr",
    "lightning_setattr",
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
        rank_zero_warn(f"attribute '{key}' removed from hparams because it cannot be pickled")
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


def _holders(model: Any, attribute: str, required: bool = False) -> list[Any]:
    holders: list[Any] = [model] if hasattr(model, attribute) else []
    hparams = getattr(model, "hparams", None)
    if hparams is not None and (attribute in hparams if isinstance(hparams, dict) else hasattr(hparams, attribute)):
        holders.append(hparams)
    datamodule = getattr(getattr(model, "_trainer", None), "datamodule", None)
    if datamodule is not None and hasattr(datamodule, attribute):
        holders.append(datamodule)
    if required and not holders:
        raise AttributeError(
            f"{attribute} is neither stored in the model namespace nor the `hparams` namespace/dict, nor the datamodule."
        )
    return holders
