"""Whether something is a torchmetrics object, without importing torchmetrics.

Its import takes longer than torch's, since it imports transformers, scipy and matplotlib where they are installed. Nobody holds a
metric who has not imported it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


def torchmetrics_if_imported() -> ModuleType | None:
    """The package, if somebody has imported it."""
    return sys.modules.get("torchmetrics")


def is_metric(value: Any) -> TypeGuard[Metric]:
    """Whether ``value`` is a ``torchmetrics.Metric``."""
    return isinstance(value, getattr(torchmetrics_if_imported(), "Metric", ()))


def is_collection(value: Any) -> TypeGuard[MetricCollection]:
    """Whether ``value`` is a ``torchmetrics.MetricCollection``."""
    return isinstance(value, getattr(torchmetrics_if_imported(), "MetricCollection", ()))


def is_metric_or_collection(value: Any) -> bool:
    """Whether ``value`` is a ``torchmetrics.Metric`` or a ``torchmetrics.MetricCollection``."""
    return is_metric(value) or is_collection(value)
