"""`LightningCLI`: a command line from the signatures of a module, its data and the Trainer.

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
    "cli": ("ArgsType", "LightningCLI"),
    "instantiation": ("ModuleType", "instantiate_class", "instantiate_module"),
    "lr_scheduler": (
        "LRSchedulerCallable",
        "LRSchedulerType",
        "LRSchedulerTypeTuple",
        "LRSchedulerTypeUnion",
        "OptimizerCallable",
        "ReduceLROnPlateau",
    ),
    "parser": ("LightningArgumentParser",),
    "save_config": ("SaveConfigCallback",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
