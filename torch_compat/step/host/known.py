"""A value of a step that is known before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torch_compat.step.host.offsets import Offset, moved
from torch_compat.step.host.scalar_plan import Expression

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, slice)


@dataclass(frozen=True)
class Known:
    """A value that is known before the step.

    Attributes:
        of: an expression that gives it.
        text: what tells it from others.
        of_state: whether buffers or parameters tell it, and no batch.
        offset: it as another number and what is added to that.
        drawn: whether torch draws it at random, before the step.
        changed: not empty where it, or what it is a part of, may have been changed in place.
    """

    of: Expression
    text: str
    of_state: bool = False
    offset: Offset | None = None
    drawn: bool = False
    changed: list[str] = field(default_factory=list)

    def then(self, function: Callable[[Any], Any], text: str) -> Known:
        """``function`` of it."""
        of, text = self.of, f"{text} of {self.text}"
        return Known(lambda host_values: function(of(host_values)), text, self.of_state, drawn=self.drawn, changed=self.changed)


def known_result(function: Callable[..., Any], args: tuple[Any, ...], operand: Callable[[Any], Known | None]) -> Known | None:
    """``function(*args)`` where all that it takes is known before the step, of which ``operand`` tells what is."""
    known = [operand(arg) for arg in args]
    if any(one is None and not issubclass(type(arg), _PLAIN) for arg, one in zip(args, known, strict=True)):
        return None
    texts = [repr(arg) if one is None else one.text for arg, one in zip(args, known, strict=True)]

    def of(host_values: Any) -> Any:
        return function(*[arg if one is None else one.of(host_values) for arg, one in zip(args, known, strict=True)])

    met = [one for one in known if one is not None]
    changed = next((one.changed for one in met), [])
    offset = None
    if len(args) == 2 and len(met) == 1:
        swap = known[0] is None
        offset = moved(function, met[0].offset or (met[0].text, 0), args[0 if swap else 1], swap=swap)
    text = f"{getattr(function, '__name__', function)!s}({', '.join(texts)})"
    return Known(of, text, all(one.of_state for one in met), offset, any(one.drawn for one in met), changed)
