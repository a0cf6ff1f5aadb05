"""``VersionedLogger``: a logger with a numbered directory for each run."""

from __future__ import annotations

import os
from abc import ABC

from torch_compat.loggers.logger import Logger
from torch_compat.loggers.versions import next_version, version_directory
from torch_compat.utilities.cloud_io import get_filesystem


class VersionedLogger(Logger, ABC):
    """Writes below ``<save_dir>/<name>/version_<n>``, also on remote filesystems through fsspec.

    Args:
        save_dir: directory that holds all experiments.
        name: experiment name; None or "" puts the versions directly into ``save_dir``.
        version: a number for ``version_<n>``, a string for a directory of that name, None for the next free number.
        prefix: put before every metric's key, followed by "-".
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(self, save_dir: str | os.PathLike[str], name: str | None, version: int | str | None, prefix: str) -> None:
        super().__init__()
        self._save_dir = os.fspath(save_dir)
        self._name = name or ""
        self._version = version
        self._prefix = prefix
        self._fs = get_filesystem(self._save_dir)

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int | str:
        """The version that was passed, else the next free number, found when first asked."""
        if self._version is None:
            self._version = next_version(self._fs, self._versions_dir)
        return self._version

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def root_dir(self) -> str:
        return os.path.join(self.save_dir, self.name)

    @property
    def _versions_dir(self) -> str:
        return self.root_dir

    @property
    def log_dir(self) -> str:
        return os.path.join(self._versions_dir, version_directory(self.version))


class RootDirectory(VersionedLogger):
    """Fabric's names: ``root_dir`` is what the Trainer's loggers call ``save_dir``."""

    @property
    def root_dir(self) -> str:
        """The directory that holds all experiments."""
        return self._save_dir

    @property
    def _versions_dir(self) -> str:
        return os.path.join(self.root_dir, self.name)
