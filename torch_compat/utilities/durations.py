"""Durations as arguments give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch_compat.utilities.exceptions import ArgumentTypeError, MisconfigurationException

_TEXT = re.compile(r"(?P<days>\d+):(?P<hours>\d{1,2}):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2})")


def to_timedelta(value: Any, problem: str) -> timedelta:
    """A duration given as ``"DD:HH:MM:SS"``, a dict of keyword arguments of ``timedelta``, or a ``timedelta``.

    Args:
        value: the duration.
        problem: how an error begins, with braces for the value: ``"`Timer(duration={!r})` is not a valid duration"``.

    Raises:
        MisconfigurationException: none of these.
        ArgumentTypeError: ``timedelta`` has no such argument.
    """
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str) and (match := _TEXT.fullmatch(value.strip())) is not None:
        return timedelta(**{unit: int(number) for unit, number in match.groupdict().items()})
    if isinstance(value, Mapping):
        try:
            return timedelta(**value)
        except TypeError as error:
            raise ArgumentTypeError(f"{problem.format(value)}: {error}") from error
    raise MisconfigurationException(
        f"{problem.format(value)}: expected 'DD:HH:MM:SS' (e.g. '00:12:00:00' for 12 hours), a timedelta, or a dict of its "
        "arguments"
    )
