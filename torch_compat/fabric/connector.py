"""How Fabric's arguments become a strategy, in :mod:`torch_compat.fabric.resolve`. API: ``lightning.fabric.connector``."""

from __future__ import annotations

from typing import Literal, get_args

from torch_compat.fabric.strategies import STRATEGY_REGISTRY
from torch_compat.refused import refusing
from torch_compat.trainer.argument_types import PluginInput as _PLUGIN_INPUT
from torch_compat.trainer.argument_types import PrecisionInput as _PRECISION_INPUT

__all__ = ["STRATEGY_REGISTRY", "_PLUGIN_INPUT", "_PRECISION_INPUT"]

_PRECISION_INPUT_INT = Literal[64, 32, 16]
_PRECISION_INPUT_STR = Literal[
    "transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true"
]
_PRECISION_INPUT_STR_ALIAS = Literal["64", "32", "16", "bf16"]
_PRECISION_INPUT_STR_ALIAS_CONVERSION = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_LITERAL_WARN = Literal["warn"]


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


__getattr__ = refusing(
    "lightning.fabric.connector",
    {
        "_Connector": "`Fabric(accelerator=…, strategy=…, devices=…)` chooses; `fabric.strategy` has the result",
        "_is_using_cli": "there is no `fabric run`; start the script with `python -m torch_compat` or `xlatrain launch`",
    },
)
