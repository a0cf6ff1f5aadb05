"""A dict that stands for one of the user's while a step is captured."""

from __future__ import annotations

from typing import Any


class OwnDict(dict[Any, Any]):
    """A dict of ours: who puts it there follows what is read and changed in it, so that notes leave it alone."""
