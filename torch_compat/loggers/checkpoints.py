"""Checkpoints that a logger has to upload."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from torch_compat.callbacks.model_checkpoint import ModelCheckpoint


class SavedCheckpoint(NamedTuple):
    """A checkpoint of a ``ModelCheckpoint``; ``saved_at`` in seconds since the epoch, ``tag`` "latest", "best" or "best_k"."""

    saved_at: float
    path: str
    score: float | None
    tag: str


def scan_checkpoints(callback: ModelCheckpoint, logged: dict[str, float]) -> list[SavedCheckpoint]:
    """The local checkpoints of ``callback`` that are new, or were overwritten since ``logged`` (path → ``saved_at``), oldest
    first."""
    candidates = {
        callback.last_model_path: (callback.current_score, "latest"),
        callback.best_model_path: (callback.best_model_score, "best"),
    }
    candidates |= {path: (score, "best_k") for path, score in callback.best_k_models.items()}
    found: list[SavedCheckpoint] = []
    for path, (score, tag) in candidates.items():
        saved_at = _saved_at(path)
        if saved_at is not None and saved_at > logged.get(path, float("-inf")):
            found.append(SavedCheckpoint(saved_at, path, score.item() if isinstance(score, Tensor) else score, tag))
    return sorted(found, key=lambda checkpoint: (checkpoint.saved_at, checkpoint.path))


def _saved_at(path: str) -> float | None:
    """The time at which the checkpoint was committed; None if none was, or not yet."""
    from xlatrain.checkpoint import commit_time_ns

    if not path:
        return None
    if (committed := commit_time_ns(path)) is not None:
        return committed * 1e-9
    return os.path.getmtime(path) if os.path.isfile(path) else None  # a plugin of the user's wrote it
