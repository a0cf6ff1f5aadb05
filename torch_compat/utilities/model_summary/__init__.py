"""Tables of a module's layers (``lightning.pytorch.utilities.model_summary``)."""

from __future__ import annotations

from torch_compat.utilities.model_summary.layer_summary import UNKNOWN_SIZE, LayerSummary, parse_batch_shape
from torch_compat.utilities.model_summary.model_summary import ModelSummary, summarize
from torch_compat.utilities.model_summary.table import (
    format_summary_table,
    get_formatted_model_size,
    get_human_readable_count,
)

__all__ = [
    "UNKNOWN_SIZE",
    "LayerSummary",
    "ModelSummary",
    "format_summary_table",
    "get_formatted_model_size",
    "get_human_readable_count",
    "parse_batch_shape",
    "summarize",
]
