"""Fabric's arguments as a strategy, see :mod:`torch_compat.fabric.resolve`. API: ``lightning.fabric.connector``."""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

from torch_compat.fabric.strategies import STRATEGY_REGISTRY
from torch_compat.trainer.argument_types import PluginInput as _PLUGIN_INPUT
from torch_compat.trainer.argument_types import PrecisionInput as _PRECISION_INPUT
from torch_compat.utilities.exceptions import MisconfigurationException

__all__ = ["STRATEGY_REGISTRY", "_PLUGIN_INPUT", "_PRECISION_INPUT"]

_PRECISION_INPUT_INT = Literal[64, 32, 16]
_PRECISION_INPUT_STR = Literal[
    "transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true",
    "int8-mixed", "float8-mixed",
]  # fmt: skip
_PRECISION_INPUT_STR_ALIAS = Literal["64", "32", "16", "bf16"]
_PRECISION_INPUT_STR_ALIAS_CONVERSION = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_LITERAL_WARN = Literal["warn"]
VARIABLES = {name: f"LT_{name.upper()}" for name in ("accelerator", "strategy", "devices", "num_nodes", "precision")}
"""Argument of Fabric → the environment variable in which ``fabric run`` hands it on."""


def _convert_precision_to_unified_args(precision: str | int | None) -> str | None:
    """``precision=`` in its long form: ``16`` is ``"16-mixed"``.

    Raises:
        ValueError: no precision.
    """
    if precision is None:
        return None
    allowed = (*get_args(_PRECISION_INPUT_STR), *get_args(_PRECISION_INPUT_INT), *get_args(_PRECISION_INPUT_STR_ALIAS))
    if precision not in allowed:
        raise ValueError(f"Precision {precision!r} is invalid. Allowed precision values: {allowed}")
    return _PRECISION_INPUT_STR_ALIAS_CONVERSION.get(str(precision), str(precision))


def from_command_line(name: str, given: Any, default: Any) -> Any:
    """Argument ``name`` of Fabric: what its variable says, a str, else what the code gives.

    Raises:
        ValueError: both say something, and not the same.
        MisconfigurationException: stock's own ``fabric run`` started a process for each device.
    """
    chosen = os.environ.get(VARIABLES[name])
    if chosen is None:
        return given
    if _is_using_cli():
        if chosen != str(given) and str(given) != str(default):
            raise ValueError(
                f"Your code has `Fabric({name}={given!r}, ...)`, the command line `--{name}={chosen}`: remove one of the two"
            )
        if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
            raise MisconfigurationException(
                f"`fabric run` of stock Lightning started {os.environ['LOCAL_WORLD_SIZE']} processes on this host; here one "
                "drives all devices of a host: start the script with `python -m torch_compat.fabric run …`, with the same options"
            )
    return chosen


def _is_using_cli() -> bool:
    """Whether ``fabric run`` started this script."""
    return bool(int(os.environ.get("LT_CLI_USED", "0")))
