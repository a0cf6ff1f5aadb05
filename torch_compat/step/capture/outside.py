"""Work that a step asks for and that a capture would take back again: it is done before the step is captured once more."""

from __future__ import annotations

from collections.abc import Callable


class OutsideFirstError(BaseException):  # it crosses the user's code, whose `except Exception` is not for it
    """A step that is being captured needs something done where no step is captured.

    Args:
        do: does it.
    """

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__()
        self.do = do
