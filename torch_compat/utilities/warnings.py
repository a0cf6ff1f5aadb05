"""Warnings about what may well be intended (``lightning.pytorch.utilities.warnings``)."""

from __future__ import annotations

import warnings


class PossibleUserWarning(UserWarning):
    """What is warned of may be intended; see :func:`disable_possible_user_warnings`."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignores warnings of category :class:`PossibleUserWarning`.

    Args:
        module: only those raised in modules whose name matches this regular expression; all by default.
    """
    warnings.filterwarnings("ignore", category=PossibleUserWarning, module=module)
