"""Callbacks that installed packages add to every run."""

from __future__ import annotations

import functools
import logging
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch_compat.utilities.rank_zero import LOGGER_NAME

_log = logging.getLogger(f"{LOGGER_NAME}.utilities.external_callbacks")


def external_callbacks(group: str) -> list[Any]:
    """The callbacks that the factories of a group of entry points return.

    Args:
        group: ``"lightning.pytorch.callbacks_factory"`` for the Trainer, ``"lightning.fabric.callbacks_factory"`` for Fabric.

    Source: https://lightning.ai/docs/pytorch/2.6.0/extensions/entry_points.html
    """
    found: list[Any] = []
    for factory in _factories(group, tuple(map(_changed, sys.path))):
        made = factory.load()()
        made = made if isinstance(made, list) else [made]
        if made:
            names = ", ".join(type(callback).__name__ for callback in made)
            _log.info(f"Adding {len(made)} callbacks from entry point '{factory.name}': {names}")
        found.extend(made)
    return found


@functools.lru_cache(maxsize=4)
def _factories(group: str, folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """The entry points of ``group``: looked up, which reads two files of each installed package, where a folder has changed."""
    return tuple(entry_points(group=group))


def _changed(folder: str) -> tuple[str, int]:
    """A folder that packages may be in, and when one last came or went; -1: there is no such folder."""
    try:
        return folder, os.stat(folder or os.curdir).st_mtime_ns
    except (OSError, ValueError):
        return folder, -1
