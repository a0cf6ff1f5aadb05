"""Installed source files: which of the files on the path an installer wrote, wherever it put them."""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import os
import sys
import sysconfig
from pathlib import Path

_PACKAGES = tuple(f"{Path(sysconfig.get_paths()[kind]).resolve()}{os.sep}" for kind in ("purelib", "stdlib"))
_FOLDERS = {"site-packages", "dist-packages"}


def is_installed(path: Path) -> bool:
    """True for a resolved path of Python's own library, or of a package that was installed.

    A package may lie anywhere: with the user's own, with the system's below a virtual environment, in a folder on
    ``PYTHONPATH`` (``pip install --target``), where files of the user's may lie beside it: there its ``RECORD`` decides.
    """
    if str(path).startswith(_PACKAGES) or not _FOLDERS.isdisjoint(path.parts):
        return True
    searched = _resolved(tuple(sys.path))
    return any(path in _recorded(folder) for folder in path.parents if folder in searched)


@functools.lru_cache(maxsize=8)
def _resolved(searched: tuple[str, ...]) -> frozenset[Path]:
    return frozenset(Path(one).resolve() for one in searched)


@functools.cache
def _recorded(folder: Path) -> frozenset[Path]:
    """The files of packages whose ``.dist-info`` lies in ``folder``."""
    records = (one.read_text("RECORD") for one in importlib.metadata.distributions(path=[str(folder)]))
    return frozenset(folder / row[0] for record in records if record for row in csv.reader(record.splitlines()) if row)
