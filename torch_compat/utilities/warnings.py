"""Warnings about what may well be intended (``lightning.pytorch.utilities.warnings``)."""

from __future__ import annotations

import os
import warnings
from pathlib import Path


class PossibleUserWarning(UserWarning):
    """A warning about something that may be intended; see :func:`disable_possible_user_warnings`."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignores warnings of category :class:`PossibleUserWarning`.

    Args:
        module: only those raised in modules whose name matches this regular expression; all by default.
    """
    warnings.filterwarnings("ignore", category=PossibleUserWarning, module=module)


_OURS = str(Path(__file__).resolve().parents[1])
_formatted = warnings.formatwarning


def _in_one_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Format our own warnings as one line: as in Lightning neither category nor source line is printed."""
    if filename.startswith(_OURS):
        return f"{filename}:{lineno}: {message}\n"
    return _formatted(message, category, filename, lineno, line)


warnings.formatwarning = _in_one_line

if os.environ.get("POSSIBLE_USER_WARNINGS", "").lower() in ("0", "off"):
    disable_possible_user_warnings()
