"""The mark of a name without a value."""

from __future__ import annotations

from typing import Any

MISSING: Any = object()
"""In place of a value that is not there."""
