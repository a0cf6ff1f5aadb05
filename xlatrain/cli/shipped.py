"""Folders that come with xlatrain beside its packages: in a checkout at its root, in a wheel below ``xlatrain/shipped``."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """The folder of that name: ``tpu_scripts`` or ``examples``.

    Raises:
        FileNotFoundError: this installation came without it.
    """
    for root in (_PACKAGE / "shipped", _PACKAGE.parent):
        if (root / name).is_dir():
            return root / name
    raise FileNotFoundError(
        f"there is no folder {name} in {_PACKAGE / 'shipped'} or {_PACKAGE.parent}: install xlatrain from its wheel"
    )
