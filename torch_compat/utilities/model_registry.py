"""Checkpoints in Lightning AI's model registry. API: ``lightning.pytorch.utilities.model_registry``."""

from __future__ import annotations

from pathlib import Path

_PREFIX = "registry"


def _is_registry(text: str | Path | None) -> bool:
    """Whether ``ckpt_path`` names a model in the registry: ``"registry"``, or ``"registry:model:version:v1"``."""
    return isinstance(text, str) and text.lower().partition(":")[0] == _PREFIX


def _parse_registry_model_version(ckpt_path: str | Path | None) -> tuple[str, str]:
    """Name and version; empty where they are not said.

    Raises:
        ValueError: no name of the registry.
    """
    if not _is_registry(ckpt_path):
        raise ValueError(f"Invalid registry path: {ckpt_path}")
    _, *parts = str(ckpt_path).split(":")
    if "version" in parts:
        at = parts.index("version")
        return (parts[0] if at else ""), ":".join(parts[at + 1 :])
    return (parts[0] if parts else ""), ""
