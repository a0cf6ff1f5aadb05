"""The contents of a dict, put back past whatever its class makes of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any


def put_entries(holder: dict[Any, Any], contents: Mapping[Any, Any]) -> None:
    """Give a dict these entries, in their order."""
    own = _own(holder)
    if list(own.keys(holder)) != list(contents):
        own.clear(holder)
    for key, value in contents.items():  # a Counter's own update adds
        own.__setitem__(holder, key, value)


def set_entry(holder: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry of a dict."""
    _own(holder).__setitem__(holder, key, value)


def drop_entries(holder: dict[Any, Any], keys: Iterable[Any]) -> None:
    """Take entries out of a dict."""
    for key in keys:
        _own(holder).__delitem__(holder, key)


def _own(holder: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The class in C whose methods know all of a dict: an ``OrderedDict`` keeps its order beside the entries."""
    return OrderedDict if isinstance(holder, OrderedDict) else dict


def put_in_order(holder: dict[Any, Any], keys: Iterable[Any]) -> None:
    """Put these entries in this order, before all others."""
    first = {key: holder[key] for key in keys if key in holder}
    put_entries(holder, {**first, **{key: one for key, one in _own(holder).items(holder) if key not in first}})
