"""Whether all processes see the same files (``lightning.pytorch.utilities.is_shared_filesystem``)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from torch_compat.utilities.rank_zero import rank_zero_only


def is_shared_filesystem(strategy: Any, path: str | Path | None = None, timeout: int = 3) -> bool:
    """Whether ``path`` is on a filesystem that all processes of ``strategy`` share; every process must call it.

    Args:
        strategy: broadcasts, synchronises and decides over the processes.
        path: an existing folder or file in it; the current folder by default. Remote URLs count as shared.
        timeout: seconds to wait for a file to appear that process 0 wrote.

    Raises:
        FileNotFoundError: the path does not exist.
    """
    if path is not None and "://" in str(path):
        return True
    where = Path(strategy.broadcast(Path.cwd() if path is None else Path(path).resolve()))
    if not strategy.reduce_boolean_decision(where.exists()):
        raise FileNotFoundError(
            f"Unable to determine if the path belongs to a shared filesystem: {str(where)!r} does not exist on some "
            "process; make it first"
        )
    if strategy.world_size == 1:
        return True
    folder = where if where.is_dir() else where.parent
    marker = folder / ".torch_compat_shared_fs_check"
    # Made before the barrier: otherwise a process that is early could see the file of an earlier call removed.
    if rank_zero_only.rank == 0:
        marker.touch()
    strategy.barrier("is_shared_filesystem: marker written")
    found = _appears(marker, timeout)
    strategy.barrier("is_shared_filesystem: marker looked for")
    if rank_zero_only.rank == 0:
        marker.unlink(missing_ok=True)
    return strategy.reduce_boolean_decision(found, all=True)


def _appears(path: Path, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not path.exists():
        # Network filesystems cache folder listings; reading one refreshes it.
        os.listdir(path.parent)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
