"""Checkpoints of earlier versions. API: ``lightning.pytorch.utilities.migration``.

Those of 2.x are read as they are. What 1.x and 0.x kept about its loops is not: their weights and hyperparameters are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packaging.version import Version

from torch_compat.checkpoint.stock_loops import REWRITE
from torch_compat.trainer.state_io import VERSION
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.warnings import PossibleUserWarning

__all__ = ["migrate_checkpoint"]


def migrate_checkpoint(
    checkpoint: dict[str, Any], target_version: str | None = None
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """A checkpoint dict in the layout of 2.6, and the changes made: none to a dict of 2.x.

    Raises:
        MisconfigurationException: one of 1.x or 0.x that holds the state of its loops, or a target other than 2.6.
    """
    if target_version is not None and Version(target_version) < Version(VERSION):
        raise MisconfigurationException(f"migrate_checkpoint(target_version={target_version!r}): leave it out; it is {VERSION}")
    if "loops" in checkpoint and _should_upgrade(checkpoint, "2.0.0"):
        raise MisconfigurationException(
            f"a checkpoint of Lightning {_get_version(checkpoint)} with the state of its loops: {REWRITE}"
        )
    if Version(_get_version(checkpoint)) > Version(VERSION):
        rank_zero_warn(
            f"The loaded checkpoint was produced with Lightning v{_get_version(checkpoint)}, which is newer than the "
            f"v{VERSION} whose API this is: its additions are ignored",
            category=PossibleUserWarning,
        )
    elif _get_version(checkpoint) != VERSION:
        checkpoint.setdefault("legacy_pytorch-lightning_version", _get_version(checkpoint))
        _set_version(checkpoint, VERSION)
    return checkpoint, {}


def _pl_migrate_checkpoint(checkpoint: dict[str, Any], checkpoint_path: str | Path | None = None) -> dict[str, Any]:
    """:func:`migrate_checkpoint` without the changes made."""
    return migrate_checkpoint(checkpoint)[0]


def _get_version(checkpoint: dict[str, Any]) -> str:
    """The version of Lightning that wrote it."""
    return checkpoint["pytorch-lightning_version"]


def _set_version(checkpoint: dict[str, Any], version: str) -> None:
    checkpoint["pytorch-lightning_version"] = version


def _set_legacy_version(checkpoint: dict[str, Any], version: str) -> None:
    """Keep the version that wrote it first."""
    checkpoint.setdefault("legacy_pytorch-lightning_version", version)


def _should_upgrade(checkpoint: dict[str, Any], target: str, max_version: str | None = None) -> bool:
    """Whether it is older than ``target``, which ``max_version`` does not exceed."""
    older = Version(_get_version(checkpoint)) < Version(target)
    return older and (max_version is None or Version(target) <= Version(max_version))
