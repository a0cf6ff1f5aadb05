"""``LitLogger``: refused by name."""

from __future__ import annotations

import importlib.util
from typing import Any

from torch_compat.loggers.logger import Logger
from torch_compat.utilities.exceptions import MisconfigurationException


class LitLogger(Logger):
    """LitLogger; not supported: it uploads to the service of Lightning AI.

    Raises:
        ModuleNotFoundError: ``litlogger`` is not installed.
        MisconfigurationException: otherwise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if importlib.util.find_spec("litlogger") is None:
            raise ModuleNotFoundError("No module named 'litlogger'", name="litlogger")
        raise MisconfigurationException(
            "LitLogger is not supported: it uploads to the service of Lightning AI. Use MLFlowLogger, WandbLogger, CometLogger,"
            " TensorBoardLogger or CSVLogger."
        )

    name = version = property(lambda self: None)  # pyright: ignore[reportAssignmentType]

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError
