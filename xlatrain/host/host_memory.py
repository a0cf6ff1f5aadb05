"""The limit of host memory that whole copies of sharded arrays may take."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

LIMIT_VARIABLE = "XLATRAIN_HOST_MEMORY"
"""Environment variable: bytes that :func:`available_host_memory` gives instead of what it would measure."""

_CGROUP = Path("/sys/fs/cgroup")


def available_host_memory(held: int = 0) -> int:
    """Bytes that one process may spend now on more whole copies: half of what is free, shared among the processes of this host.

    Args:
        held: bytes of the copies that it has already; they count against a given limit.

    Raises:
        ValueError: ``XLATRAIN_HOST_MEMORY`` is not a number of bytes.
    """
    if (limit := given_limit()) is not None:
        return limit - held
    free = min(psutil.virtual_memory().available, _free_in_cgroup())
    return free // 2 // max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)


def given_limit() -> int | None:
    """The limit that the environment sets, in bytes. Asked for before a run, too: it is needed at its end.

    Raises:
        ValueError: ``XLATRAIN_HOST_MEMORY`` is not a number of bytes.
    """
    given = os.environ.get(LIMIT_VARIABLE)
    try:
        return None if given is None else int(float(given))
    except (ValueError, OverflowError):
        raise ValueError(f"{LIMIT_VARIABLE}={given!r}; expected a number of bytes, e.g. 8e9") from None


def _free_in_cgroup() -> int:
    """Bytes that a container's limit leaves (cgroup v2); memory that only caches files counts as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return 1 << 62
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return 1 << 62
    return max(int(limit) - used, 0)
