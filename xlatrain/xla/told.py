"""Text of what a program is made from, which is the same in another process if, and only if, that is the same."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

_OURS = ("xlatrain.", "torch_compat.")
"""Packages whose sources are part of every key (:func:`xlatrain.xla.kept_files.key_of`)."""
_LITERALS = (type(None), bool, int, float, complex, str, bytes)


OF_NO_PROGRAM = frozenset(
    f"XLATRAIN_{name}"
    for name in (
        *("CACHE_DIR", "COORDINATOR", "DEAD_AFTER", "HANG_AFTER", "JOIN_WITHIN", "LEDGER", "LOCAL_PROCESS_ID"),
        *(
            "NEIGHBOUR_MEMORY",
            "NO_RECOMPILATION_AFTER",
            "PROCESS_ID",
            "REPORT",
            "RESUME_SINCE",
            "SECRET",
            "SLOW_AFTER",
            "VERBOSE",
            "WATCH",
        ),
    )
)
"""Environment variables of ours by which no graph and no program becomes another one."""


class NotToldError(Exception):
    """Nothing can be said of a value that another process would understand."""


def told(value: Any) -> str:
    """``value`` as text: literals, containers, dataclasses and functions of ours, shardings, dtypes.

    Raises:
        NotToldError: it is, or has, something else.
    """
    kind = type(value)
    if kind in _LITERALS:
        return repr(value)
    if kind in (tuple, list):
        return f"{kind.__name__}({','.join(map(told, value))})"
    if kind in (set, frozenset):
        return f"{kind.__name__}({','.join(sorted(map(told, value)))})"
    if kind is dict or kind is types.MappingProxyType:
        return f"dict({','.join([f'{told(key)}:{told(one)}' for key, one in value.items()])})"
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "layout", "memory_format", "device", "Size"):
        return repr(value)
    if isinstance(value, np.dtype):
        return f"numpy {value}"
    return _told_of_jax(value) or _told_of_ours(value)


def _told_of_jax(value: Any) -> str | None:
    if isinstance(value, Mesh):
        devices = [one.id for one in value.devices.flat]
        return f"mesh({value.axis_names},{value.devices.shape},{devices},{value.axis_types})"
    if isinstance(value, NamedSharding):
        return f"named({told(value.mesh)},{value.spec},{value.memory_kind})"
    if isinstance(value, SingleDeviceSharding):
        return f"single({[one.id for one in value.device_set]},{value.memory_kind})"
    if isinstance(value, PartitionSpec | jax.tree_util.PyTreeDef):
        return repr(value)
    return None


def _told_of_ours(value: Any) -> str:
    kind = type(value)
    if isinstance(value, types.FunctionType | type):
        if f"{value.__module__}.".startswith(_OURS) and not getattr(value, "__closure__", None):
            return f"{value.__module__}.{value.__qualname__}"
        raise NotToldError(f"{value} is not ours")
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not name.startswith(_OURS):
        raise NotToldError(f"{name} is not ours")
    if isinstance(value, enum.Enum):
        return f"{name}.{value.name}"
    if dataclasses.is_dataclass(value):
        return f"{name}({','.join([f'{one.name}={told(getattr(value, one.name))}' for one in dataclasses.fields(value)])})"
    if isinstance(value, tuple):
        return f"{name}({','.join(map(told, value))})"
    if isinstance(value, str):
        return f"{name}({str.__repr__(value)},{told(vars(value))})"
    raise NotToldError(f"{name} says nothing of itself")


def told_arguments(args: Any) -> str:
    """Arguments of a program: their structure, and of each array dtype, shape and place.

    Raises:
        NotToldError: one is no array on devices.
    """
    leaves, structure = jax.tree.flatten(args)
    words = [repr(structure)]
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            words.append(f"{leaf.dtype}{leaf.shape}{leaf.weak_type}{leaf.committed}{told(leaf.sharding)}")  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(leaf, np.ndarray | np.generic):
            words.append(f"numpy {leaf.dtype}{leaf.shape}")
        elif type(leaf) in (bool, int, float, complex):
            words.append(type(leaf).__name__)
        else:
            raise NotToldError(f"{type(leaf).__qualname__} is no array")
    return "\n".join(words)


def told_settings(names: Mapping[str, Any]) -> str:
    """Settings by name, where they are literals or print as ones."""
    return "\n".join(f"{name}={value!r}" for name, value in sorted(names.items()))
