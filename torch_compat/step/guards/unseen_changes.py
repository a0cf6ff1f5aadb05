"""Changes by functions whose source is not there (``python -c``, ``exec``), which get no notes: read off their instructions."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterator, Sequence

_METHODS = frozenset(
    {"append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "discard", "clear"}
    | {"update", "setdefault", "add", "sort", "reverse", "rotate", "subtract", "move_to_end", "difference_update"}
    | {"intersection_update", "symmetric_difference_update", "__setitem__", "__delitem__", "__setattr__", "write"}
)
_FUNCTIONS = frozenset({"setattr", "delattr"})
_LOCALS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")
_PAIRS = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}
"""Instructions of Python 3.13 and later that are two of before."""
_MADE = ("BUILD_LIST", "BUILD_MAP", "BUILD_SET", "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "BUILD_CONST_KEY_MAP")


@functools.lru_cache(maxsize=1024)
def change_of(code: types.CodeType) -> str | None:
    """The text of a change of something else than what a function makes, ``self.name`` and what that holds; None without one."""
    steps = list(_steps(code))
    own = _own_names(code, steps)
    first = code.co_varnames[0] if code.co_argcount else None
    for at, one in enumerate(steps):
        name, text = one.opname, str(one.argval)
        if name in ("STORE_GLOBAL", "DELETE_GLOBAL") or (name == "STORE_DEREF" and text in code.co_freevars):
            return text
        if name.startswith("LOAD_") and text in _FUNCTIONS:
            return f"{text}(…)"
        if name in ("STORE_ATTR", "DELETE_ATTR") and _is_outside(steps[: _owner_end(steps, at)], first, own, depth=0):
            return f"….{text}"
        if name in ("STORE_SUBSCR", "DELETE_SUBSCR") and _is_outside(steps[: _owner_end(steps, at) - 1], first, own, depth=1):
            return "…[…]"
        if name in ("LOAD_METHOD", "LOAD_ATTR") and text in _METHODS and _is_outside(steps[:at], first, own, depth=1):
            return f"….{text}(…)"
        if _is_in_place(one) and steps[at - 1].opname in _MADE and steps[at + 1].argval not in own:
            return "… += …"
    return next(filter(None, (change_of(one) for one in code.co_consts if isinstance(one, types.CodeType))), None)


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    for one in dis.get_instructions(code):
        if one.opname in _PAIRS:
            for name, variable in zip(_PAIRS[one.opname], one.argval, strict=True):
                yield one._replace(opname=name, argval=variable)
        elif one.opname not in ("EXTENDED_ARG", "CACHE", "NOP", "PUSH_NULL"):
            yield one


def _is_in_place(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_OP" and step.argrepr.endswith("=")


def _own_names(code: types.CodeType, steps: Sequence[dis.Instruction]) -> set[str]:
    """The variables that never are anything but a container that the function has made."""
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]
    made: dict[str, bool] = {}
    for before, one in itertools.pairwise(steps):
        if one.opname in ("STORE_FAST", "STORE_DEREF") and not _is_in_place(before):
            made[one.argval] = made.get(one.argval, True) and before.opname in _MADE
    return {name for name, always in made.items() if always and name not in arguments}


def _owner_end(steps: Sequence[dis.Instruction], at: int) -> int:
    """The end of the instructions that load the owner of what is stored: an augmented assignment has them before its COPY."""
    at -= 1
    if steps[at].opname == "SWAP":
        while at > 0 and steps[at].opname != "COPY":
            at -= 1
        while at > 0 and steps[at - 1].opname == "COPY":
            at -= 1
        return at
    return at + 1


def _is_outside(loads: Sequence[dis.Instruction], first: str | None, own: set[str], depth: int) -> bool:
    """Whether these instructions end with the load of something else than ``own``, or ``self`` with this many attributes."""
    at, attributes = len(loads) - 1, 0
    while at > 0 and loads[at].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        at, attributes = at - 1, attributes + 1
    if at < 0 or loads[at].opname not in _LOCALS:
        return True
    name = loads[at].argval
    return not ((name in own and attributes == 0) or (name == "self" == first and attributes <= depth))
