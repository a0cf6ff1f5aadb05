"""Objects of :mod:`unittest.mock` in place of the real ones: they count their calls, which a compiled step makes once.

Found by their classes, since a mock answers to every attribute that it is asked for.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import NonCallableMock


def is_mock_class(kind: type) -> bool:
    """Whether instances of a class are mocks."""
    return issubclass(kind, NonCallableMock)


def stands_in(function: Any) -> bool:
    """Whether a test put it in place of a function: a mock, or the function that ``patch(autospec=True)`` makes of one."""
    return is_mock_class(type(function)) or is_mock_class(type(getattr(function, "mock", None)))
