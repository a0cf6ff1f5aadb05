"""Progress bars."""

from __future__ import annotations

from torch_compat.callbacks.progress.progress_bar import ProgressBar
from torch_compat.callbacks.progress.rich_progress import RichProgressBar
from torch_compat.callbacks.progress.tqdm_progress import TQDMProgressBar

__all__ = ["ProgressBar", "RichProgressBar", "TQDMProgressBar"]
