"""Availability of packages and versions, under Lightning's names; most are in stock's table of names as expressions.

API: ``lightning.pytorch.utilities.imports``, ``lightning.fabric.utilities.imports``.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

import torch
from lightning_utilities.core.imports import RequirementCache, compare_version, module_available, package_available

from torch_compat.stock_names import table
from torch_compat.utilities.rank_zero import rank_zero_warn

__all__ = ["RequirementCache", "compare_version", "module_available", "package_available", "rank_zero_warn"]

_KINETO_AVAILABLE: bool = torch.profiler.kineto_available()
_TORCHVISION_AVAILABLE = RequirementCache("torchvision")
_XLA_AVAILABLE = RequirementCache("torch_xla>=1.13", "torch_xla")


def _try_import_module(module_name: str) -> bool:
    """Whether a module can be imported; with a warning if it is there and its import fails."""
    try:
        importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == module_name.partition(".")[0]:
            return False
        rank_zero_warn(f"Import of {module_name} package failed for some compatibility issues:\n{error}")
        return False
    except ImportError as error:
        rank_zero_warn(f"Import of {module_name} package failed for some compatibility issues:\n{error}")
        return False
    return True


def __getattr__(name: str) -> Any:
    """``_TORCH_GREATER_EQUAL_1_13`` and the like, of versions nobody has to ask for; names stock keeps elsewhere."""
    if name.startswith("_TORCH_GREATER_EQUAL_"):
        return compare_version("torch", operator.ge, ".".join(name.removeprefix("_TORCH_GREATER_EQUAL_").split("_")))
    if name.endswith("_AVAILABLE"):
        for module, entry in table.stock().items():
            if name in entry.get("values", ()):
                return table.look_up(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
