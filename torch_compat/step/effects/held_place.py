"""The place of a value in a container or an object, wherever the step finds that."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_compat.step.effects.effects import ObjectPath
from torch_compat.step.values.names import MISSING

HOLDERS = (dict, list, deque)
"""The classes of containers that have entries."""


@dataclass(frozen=True)
class HeldPlace:
    """An attribute of an object, or an entry of a dict, list or deque.

    Two places may have one text, as entries under keys with one ``repr``: they are told apart by themselves.
    """

    holder: ObjectPath
    key: Any
    is_attribute: bool

    def contents(self, roots: Mapping[str, Any]) -> Any:
        """The dict, list or deque that has it; None where there is none."""
        try:
            found = self.holder.find(roots, strictly=True)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None
        return getattr(found, "__dict__", None) if self.is_attribute else found if isinstance(found, HOLDERS) else None

    def value(self, roots: Mapping[str, Any]) -> Any:
        """The present value."""
        contents = self.contents(roots)
        if isinstance(contents, dict):
            return dict.get(contents, self.key, MISSING)
        try:
            return MISSING if contents is None else contents[self.key]
        except (IndexError, TypeError):
            return MISSING

    def __str__(self) -> str:
        return f"{self.holder}.{self.key}" if self.is_attribute else f"{self.holder}[{self.key!r}]"
