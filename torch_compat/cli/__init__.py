"""``LightningCLI``: a command line from the signatures of a module, its data and the Trainer.

API: ``lightning.pytorch.cli``. Importing this package loads neither torch nor the parser; its names do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_compat.cli.cli import ArgsType, LightningCLI
    from torch_compat.cli.instantiation import instantiate_class, instantiate_module
    from torch_compat.cli.lr_scheduler import (
        LRSchedulerCallable,
        LRSchedulerType,
        LRSchedulerTypeTuple,
        LRSchedulerTypeUnion,
        OptimizerCallable,
        ReduceLROnPlateau,
    )
    from torch_compat.cli.parser import LightningArgumentParser
    from torch_compat.cli.save_config import SaveConfigCallback

__all__ = [
    "ArgsType",
    "LRSchedulerCallable",
    "LRSchedulerType",
    "LRSchedulerTypeTuple",
    "LRSchedulerTypeUnion",
    "LightningArgumentParser",
    "LightningCLI",
    "OptimizerCallable",
    "ReduceLROnPlateau",
    "SaveConfigCallback",
    "instantiate_class",
    "instantiate_module",
]

_HOMES = {
    "ArgsType": "cli",
    "LRSchedulerCallable": "lr_scheduler",
    "LRSchedulerType": "lr_scheduler",
    "LRSchedulerTypeTuple": "lr_scheduler",
    "LRSchedulerTypeUnion": "lr_scheduler",
    "LightningArgumentParser": "parser",
    "LightningCLI": "cli",
    "ModuleType": "instantiation",
    "OptimizerCallable": "lr_scheduler",
    "ReduceLROnPlateau": "lr_scheduler",
    "SaveConfigCallback": "save_config",
    "instantiate_class": "instantiation",
    "instantiate_module": "instantiation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
