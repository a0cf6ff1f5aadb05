"""Compiled steps for stock Lightning's own Trainer: ``Trainer(strategy=xlatrain.lightning.MeshStrategy(...))``.

The one package that imports the real ``lightning``. Loops, hooks, loggers, callbacks and checkpoints are stock's; a step is
captured, compiled and run by :mod:`torch_compat.step`, as under this package's Trainer (``docs/design/0034-stock-trainer.md``).
"""

from __future__ import annotations

from torch_compat.stock_trainer.stock import check_stock

check_stock()

from torch_compat.stock_trainer.strategy import MeshStrategy  # noqa: E402  stock is there, and of a release that is known

__all__ = ["MeshStrategy"]
