"""PyTorch-Lightning-compatible facade over ``xlatrain``.

``import torch_compat as pl`` gives what ``import lightning.pytorch as pl`` gives; :func:`torch_compat.install.install` (or
``python -m torch_compat script.py``) lets unchanged scripts import it under Lightning's own names. Everything is imported on
first use: importing this package loads neither torch nor jax.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch_compat.stock_names.aliases import with_stock_names
from torch_compat.stock_names.first_import import first_import

if TYPE_CHECKING:
    from torch_compat.callbacks import Callback
    from torch_compat.core.datamodule import LightningDataModule
    from torch_compat.core.module import LightningModule
    from torch_compat.install import install
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.seed import seed_everything
    from xlatrain.bridge.nnx_module import jax_module

__version__ = "2.6.6"
"""The Lightning release whose API this is: what scripts compare ``lightning.__version__`` with."""

__all__ = ["Callback", "LightningDataModule", "LightningModule", "Trainer", "install", "jax_module", "seed_everything"]

_HOMES = {
    "Callback": "torch_compat.callbacks",
    "LightningDataModule": "torch_compat.core.datamodule",
    "LightningModule": "torch_compat.core.module",
    "Trainer": "torch_compat.trainer.trainer",
    "cli_lightning_logo": "torch_compat.trainer.stock_names",
    "disable_possible_user_warnings": "torch_compat.utilities.warnings",
    "install": "torch_compat.install",
    "jax_module": "xlatrain.bridge.nnx_module",
    "seed_everything": "torch_compat.utilities.seed",
}

with_stock_names(sys.modules[__name__])  # and all below it, as they are imported


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(first_import(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext torch_compat`` in a notebook: :func:`torch_compat.install.install`.

    Raises:
        ImportError: the real Lightning was imported before; the kernel must be restarted.
    """
    from torch_compat.install import install as lightning_names

    try:
        lightning_names()
    except ImportError as error:
        error.add_note("Restart the kernel, and run %load_ext torch_compat in the first cell.")
        raise


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
