"""Which keys a query sees, by their numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Band:
    """Query ``i`` sees the keys from ``i - left`` to ``i + right``; None: without an end on that side."""

    left: int | None = None
    right: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every query sees every key."""
        return self.left is None and self.right is None

    @property
    def is_causal(self) -> bool:
        """Whether it is torch's ``is_causal``, and no more."""
        return self.left is None and self.right == 0

    def keys_of(self, begin: int, end: int, keys: int) -> tuple[int, int]:
        """The first key that one of the queries ``begin`` to ``end`` sees, and the one after the last: at least one of
        ``keys``."""
        first = 0 if self.left is None else max(0, begin - self.left)
        last = keys if self.right is None else min(keys, end + self.right)
        first = min(first, keys - 1)
        return first, max(last, first + 1)

    def pairs(self, queries: int, keys: int) -> int:
        """Count the pairs of a query and a key that it sees."""
        total = 0
        for row in range(queries):
            first = 0 if self.left is None else max(0, row - self.left)
            last = keys if self.right is None else min(keys, row + 1 + self.right)
            total += max(0, last - first)
        return total

    def sees_some(self, queries: int, keys: int) -> bool:
        """Whether each of the queries sees a key."""
        if self.left is not None and queries - 1 - self.left >= keys:
            return False
        if self.right is not None and self.right < 0:
            return False
        return self.left is None or self.right is None or self.left + self.right >= 0

    def __str__(self) -> str:
        if self.is_whole:
            return "every key"
        if self.is_causal:
            return "causal"
        first = "the first" if self.left is None else f"-{self.left}"
        last = "the last" if self.right is None else f"+{self.right}"
        return f"keys from {first} to {last}"


WHOLE, CAUSAL = Band(), Band(None, 0)
