"""Lists, tuples, dicts and arrays of numbers, in which a step looks a counter up."""

from __future__ import annotations

from typing import Any

import numpy as np

_FEW = 8
"""Entries that a text has one by one."""
HOLDERS = frozenset({list, tuple, set, frozenset, dict})
HASHED_BY_VALUE = frozenset({int, float, bool, str, bytes, type(None)})


def numbers_in(holder: Any) -> Any:
    """The entries of a list, tuple, dict or array where all are numbers of one type; None for anything else."""
    kind = type(holder)
    if kind is np.ndarray and holder.ndim == 1 and holder.dtype.kind in "fi":
        return tuple(holder.tolist())
    if kind is dict and {type(key) for key in holder} <= HASHED_BY_VALUE:
        return dict(holder) if {type(one) for one in holder.values()} in ({int}, {float}) else None
    return tuple(holder) if kind in (list, tuple) and {type(one) for one in holder} in ({int}, {float}) else None


def text_of(entries: Any) -> str:
    """A text that only these entries have."""
    if type(entries) is range or len(entries) <= _FEW:
        return str(sorted(entries, key=repr) if type(entries) is frozenset else entries)
    parts = frozenset(entries.items()) if type(entries) is dict else entries
    return f"{len(entries)} entries {hash(parts)}"
