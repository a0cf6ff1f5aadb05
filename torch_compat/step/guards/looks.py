"""Looks of functions, by their source: at all with which they do more than to fill it."""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Iterable, Mapping

from torch_compat.step.guards.origins import names_of


def looked_at(functions: Iterable[types.FunctionType]) -> frozenset[str]:
    """The names of attributes and variables with which functions do more than ``name.append(…)`` and ``name[…] = …``."""
    found: set[str] = set()
    for function in functions:
        code = function.__code__
        lines = _looks(code.co_filename, len(linecache.getlines(code.co_filename)))
        last = _last_line(code)
        found.update(name for name, line in lines if code.co_firstlineno <= line <= last)
        if not lines:  # no source
            found |= names_of(code)
    return frozenset(found)


def _last_line(code: types.CodeType) -> int:
    inner = [_last_line(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return max([code.co_firstlineno, *inner, *(line for *_, line in code.co_lines() if line is not None)])


@functools.lru_cache(maxsize=256)
def _looks(filename: str, length: int) -> frozenset[tuple[str, int]]:
    """``(name, line)`` of each use of an attribute or variable in a file that does more than to fill it."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)[:length]))
    except SyntaxError:
        return frozenset()
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)]
    return frozenset(
        (node.attr if isinstance(node, ast.Attribute) else node.id, node.lineno) for node in used if not _fills(node, above)
    )


def _fills(node: ast.AST, above: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether a statement does nothing with ``node`` but to put something into it, or into an entry of it."""
    parent = above[node]
    if isinstance(parent, ast.Subscript) and parent.value is node:
        stored = isinstance(parent.ctx, ast.Store) and not isinstance(above[parent], ast.AugAssign)
        return stored or (isinstance(parent.ctx, ast.Load) and _fills(parent, above))
    call = above.get(parent)
    if not isinstance(parent, ast.Attribute) or not isinstance(call, ast.Call) or call.func is not parent:
        return False
    if parent.attr == "setdefault":
        return _fills(call, above)
    return parent.attr in ("append", "extend", "add") and isinstance(above[call], ast.Expr)
