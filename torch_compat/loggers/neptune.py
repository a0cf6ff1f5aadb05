"""``NeptuneLogger``: gone, as in Lightning 2.6."""

from __future__ import annotations

from typing import Any


class NeptuneLogger:
    """Neptune's service has ended.

    Raises:
        RuntimeError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "NeptuneLogger is no longer supported: Neptune has been sunset. Use MLFlowLogger, WandbLogger, CometLogger,"
            " TensorBoardLogger or CSVLogger."
        )
