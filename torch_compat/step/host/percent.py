"""``"%.3f" % loss``: Python's older way to format, of numbers that come after the step."""

from __future__ import annotations

import operator
import re
from typing import Any

from torch_compat.step.host.calls import is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.later_text import LaterText, put_together
from torch_compat.step.host.said import Said, said
from xlatrain.bridge.errors import CaptureError

CONVERSION = re.compile(r"%(?:\((?P<name>[^)]*)\))?(?P<form>[-#0 +]*(?:\*|\d+)?(?:\.(?:\*|\d+))?)[hlL]?(?P<kind>.)", re.DOTALL)
_NUMBERS = "diouxXeEfFgGc"
_MISSING = object()


def percent(template: Any, values: Any, *, is_said: bool) -> Any:
    """``template % values``, of which values may be numbers that come after the step.

    Args:
        is_said: counters are those of each step.
    """
    given = tuple(values.values()) if type(values) is dict else values if type(values) is tuple else (values,)
    if is_said:
        given = tuple(map(said, given))
    if type(template) is not str or not any(map(_comes_later, given)):
        return template % values
    names = dict(zip(values, given, strict=True)) if type(values) is dict else {}
    parts: list[str] = []
    rest, end = iter(given), 0
    for found in CONVERSION.finditer(template):
        parts.append(template[end : found.start()])
        end = found.end()
        if found["kind"] == "%":
            parts.append("%")
            continue
        form = found["form"]
        while "*" in form:
            form = form.replace("*", str(operator.index(next(rest, 0))), 1)
        value = next(rest, _MISSING) if found["name"] is None else names.get(found["name"], _MISSING)
        if value is _MISSING:
            return template % values
        parts.append(_part(f"%{form}{found['kind']}", value))
    if type(values) is not dict and next(rest, _MISSING) is not _MISSING:
        return template % values  # which raises what Python raises
    return put_together("".join([*map(str.__str__, parts), template[end:]]))


def _comes_later(value: Any) -> bool:
    return type(value) in (HostFuture, LaterText, Said) or is_traced(value)


def _part(form: str, value: Any) -> str:
    if not _comes_later(value):
        return form % value
    if type(value) is LaterText:
        return value.by_percent(form)
    if form in ("%s", "%r"):
        return str(value) if form == "%s" else repr(value)
    if is_traced(value):
        if form[-1] not in _NUMBERS:
            raise CaptureError(f"the step cannot be captured: it formats a tensor by {form!r}.\n  Fix: format it by '%s'.")
        value = value.item()
    return value.text_by(operator.mod, form)
