"""The stock Lightning beside which this package runs: whether it is there, which release it is, and what is not done in it."""

from __future__ import annotations

import importlib.metadata
import sys

from torch_compat.stock_names.aliases import has_finder
from torch_compat.utilities.exceptions import MisconfigurationException

RELEASES = "2.6"
INSTEAD = "run the script under this package's own Trainer: `python -m torch_compat script.py`"


def check_stock() -> None:
    """Whether the real Lightning can be imported under its own name, in a release whose Strategy is known.

    Raises:
        ImportError: ``lightning`` is torch_compat here, is not installed, or is another release.
    """
    if has_finder():
        raise ImportError(
            "xlatrain.lightning is for stock Lightning's own Trainer, but in this process `lightning` is torch_compat "
            "(`python -m torch_compat`, or torch_compat.install()). Its Trainer compiles steps itself: use "
            "Trainer(strategy='mesh'), or lightning.pytorch.strategies.MeshStrategy(...)"
        )
    try:
        found = importlib.metadata.version("lightning")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            "xlatrain.lightning needs stock Lightning, which is not installed: pip install 'xlatrain[lightning]'. Without it, "
            f"{INSTEAD}"
        ) from None
    if found.split(".")[:2] != RELEASES.split("."):
        raise ImportError(
            f"xlatrain.lightning works with lightning {RELEASES}.*, but {found} is installed: pip install 'xlatrain[lightning]'"
        )
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        raise ImportError(
            "xlatrain.lightning is for `import lightning`, but this process has imported `pytorch_lightning`, whose classes are "
            "others: import lightning.pytorch as pl instead"
        )


def refuse(what: str, why: str, instead: str = INSTEAD) -> MisconfigurationException:
    """The error for what stock's Trainer offers and a mesh strategy does not."""
    return MisconfigurationException(
        f"MeshStrategy in stock Lightning's Trainer: {what} is not offered: {why}. Instead, {instead}"
    )
