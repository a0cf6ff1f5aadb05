"""Hyperparameters as loggers want them: a flat dict of plain values."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor


def as_dict(params: Mapping[str, Any] | Namespace | None) -> dict[str, Any]:
    """``params`` as a dict (a copy): a namespace gives its attributes, None gives an empty dict."""
    if params is None:
        return {}
    return dict(vars(params)) if isinstance(params, Namespace) else dict(params)


def flatten(params: Mapping[Any, Any], delimiter: str = "/", parent: str = "") -> dict[str, Any]:
    """Nested mappings, namespaces, dataclasses and lists of mappings as one level: ``{"a": {"b": 1}}`` → ``{"a/b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        path = f"{parent}{delimiter}{key}" if parent else str(key)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        elif isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, MutableMapping):
            flat.update(flatten(value, delimiter, path))
        elif isinstance(value, list) and all(isinstance(item, MutableMapping) for item in value):
            for index, item in enumerate(value):
                flat.update(flatten(item, delimiter, f"{path}{delimiter}{index}"))
        else:
            flat[path] = value
    return flat


def plain_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """bool, int, float, str and tensors of at most one dim as they are, numpy scalars as Python's, anything else as its
    ``str``."""
    return {key: _plain_value(value) for key, value in params.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if type(value) not in (bool, int, float, str, Tensor) or (isinstance(value, Tensor) and value.ndim > 1):
        return str(value)
    return value


def call_callables(params: Mapping[str, Any]) -> dict[str, Any]:
    """Classes by their name; other callables by what they return without arguments, or by their name if that fails."""
    return {key: _call_callable(value) for key, value in params.items()}


def _call_callable(value: Any) -> Any:
    if isinstance(value, type):
        return value.__name__
    if not callable(value):
        return value
    name = getattr(value, "__name__", None)
    try:
        result = value()
    except Exception:  # the user's callable: whatever it raises, its name is what is logged
        return name
    return name if callable(result) else result


def json_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as values of JSON: a value that JSON cannot hold becomes its ``str``."""
    return {key: value if is_json(value) else str(value) for key, value in params.items()}


def is_json(value: Any) -> bool:
    """Whether JSON can hold ``value``; the elements of a list or dict are not looked at."""
    if value is None or isinstance(value, (bool, int, float, str, list, dict)):
        return True
    try:
        json.dumps(value)
    except (TypeError, OverflowError):
        return False
    return True


def add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> dict[str, Any]:
    """``metrics`` with ``prefix`` and ``separator`` before each key; unchanged if the prefix is empty."""
    return {f"{prefix}{separator}{key}": value for key, value in metrics.items()} if prefix else dict(metrics)
