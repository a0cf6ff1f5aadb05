"""Callbacks that installed packages add to every run."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
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
    for factory in entry_points(group=group):
        made = factory.load()()
        made = made if isinstance(made, list) else [made]
        if made:
            names = ", ".join(type(callback).__name__ for callback in made)
            _log.info(f"Adding {len(made)} callbacks from entry point '{factory.name}': {names}")
        found.extend(made)
    return found
