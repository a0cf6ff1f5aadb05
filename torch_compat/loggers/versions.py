"""Version directories: ``version_0``, ``version_1``, ... below an experiment's directory."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_VERSION_DIRECTORY = re.compile(r"version_(\d+)(?:_|$)")


def next_version(filesystem: AbstractFileSystem, experiment_dir: str) -> int:
    """The number after the highest ``version_<n>`` directory below ``experiment_dir``; 0 without any."""
    try:
        entries = filesystem.listdir(experiment_dir)
    except OSError:
        return 0
    names = {os.path.basename(entry["name"].rstrip("/")) for entry in entries if filesystem.isdir(entry["name"])}
    taken = [int(match.group(1)) for name in names if (match := _VERSION_DIRECTORY.match(name))]
    return max(taken, default=-1) + 1


def version_directory(version: int | str) -> str:
    """The name of a version's directory: a string is used as it is."""
    return version if isinstance(version, str) else f"version_{version}"
