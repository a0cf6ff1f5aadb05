"""Hyperparameters and metric names for loggers, under Lightning's names. API: ``lightning.fabric.utilities.logger``."""

from __future__ import annotations

from torch_compat.utilities.hyperparameters import add_prefix as _add_prefix
from torch_compat.utilities.hyperparameters import as_dict as _convert_params
from torch_compat.utilities.hyperparameters import call_callables as _sanitize_callable_params
from torch_compat.utilities.hyperparameters import flatten as _flatten_dict
from torch_compat.utilities.hyperparameters import is_json as _is_json_serializable
from torch_compat.utilities.hyperparameters import json_values as _convert_json_serializable
from torch_compat.utilities.hyperparameters import plain_values as _sanitize_params

__all__ = [
    "_add_prefix",
    "_convert_json_serializable",
    "_convert_params",
    "_flatten_dict",
    "_is_json_serializable",
    "_sanitize_callable_params",
    "_sanitize_params",
]
