"""Helpers that act on process 0 only (``lightning.pytorch.utilities.rank_zero``).

The functions are those of ``lightning_utilities``, which torchmetrics shares, so that all of them agree on one
``rank_zero_only.rank``. Messages go to children of the logger ``lightning.pytorch``: the name by which Lightning's
documentation tells users to silence or redirect them.
"""

from __future__ import annotations

import logging
import os

import lightning_utilities.core.rank_zero as _rank_zero
from lightning_utilities.core.rank_zero import (
    WarningCache,
    rank_prefixed_message,
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)

__all__ = [
    "LightningDeprecationWarning",
    "WarningCache",
    "rank_prefixed_message",
    "rank_zero_debug",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]

LOGGER_NAME = "lightning.pytorch"


class LightningDeprecationWarning(DeprecationWarning):
    """The category of ``rank_zero_deprecation`` messages."""


_rank_zero.rank_zero_deprecation_category = LightningDeprecationWarning

# The launchers' variables, most specific last: torchrun, a local launcher, SLURM, LSF.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def _get_rank() -> int | None:
    for variable in _RANK_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return None


def _configure_logger() -> None:
    """INFO on stderr unless the application has set logging up, as stock does."""
    logger = logging.getLogger(LOGGER_NAME)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logging.getLogger().hasHandlers() and not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False


class _SilencedByOldName(logging.Filter):
    """Heeds ``logging.getLogger("pytorch_lightning").setLevel(...)`` as well, the name in older documentation."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.getLogger("pytorch_lightning").level


_configure_logger()
_rank_zero.log = logging.getLogger(f"{LOGGER_NAME}.utilities.rank_zero")
_rank_zero.log.addFilter(_SilencedByOldName())
# Trainer sets the real process index once the world is joined; until then a launcher's variable decides who speaks.
if getattr(rank_zero_only, "rank", None) is None:
    rank_zero_only.rank = _get_rank() or 0
