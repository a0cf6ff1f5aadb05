"""Which names of other libraries the packages and tools use that are not theirs to use: private ones, and any that they replace.

Read from the source, so that a use counts wherever it is: ``torch._C._x`` by whatever local name, an attribute ``value._x`` of
any object, a string that names one (``getattr(value, "_x")``, a patch ``(torch.compiler, "_x", …)``, a list of names), a keyword
``_x=``, and a method ``_x`` of a class that is derived from a library's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = ("xlatrain", "torch_compat", "tools")
_NOT_PRIVATE = frozenset({"_", "_fields", "_make", "_replace", "_asdict", "_field_defaults", "_exit", "_generate_next_value_"})
"""Documented, with an underscore: a namedtuple's, ``os._exit``."""
_PARTS_OF_NAMES = frozenset({"startswith", "endswith", "removeprefix", "removesuffix", "replace", "partition", "split", "strip"})
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") and part not in _NOT_PRIVATE for part in name.split("."))


@dataclass(frozen=True)
class Use:
    """A use of a name.

    Attributes:
        name: from the library's top package on where the source says it; else the attribute, the keyword or the string alone.
        where: ``file:line``.
        replaced: it is set to something of ours.
        own: it is asked of ``self``, ``cls`` or ``super()``, or its class defines it.
        text: it is a string.
    """

    name: str
    where: str
    replaced: bool = False
    own: bool = False
    text: bool = False


def uses_in(source: str, where: str = "source") -> Iterator[Use]:
    """The uses of one file."""
    tree = ast.parse(source)
    finder = _Finder(where, _docstrings(tree))
    finder.run(tree)
    yield from finder.uses


def defined_in(source: str) -> Iterator[str]:
    """Every name that a file gives to something: functions, classes, parameters, variables, attributes of ``self``, slots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "__slots__" for target in node.targets):
            yield from (
                part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )


def _is_own(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _docstrings(tree: ast.AST) -> set[int]:
    """The strings that are statements of their own."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


class _Finder:
    """Walks a file with what local names stand for: a dotted name of a library, or None for anything else."""

    def __init__(self, where: str, docstrings: set[int]) -> None:
        self.uses: list[Use] = []
        self._where = where
        self._skipped = docstrings

    def run(self, tree: ast.Module) -> None:
        self._body(tree.body, {})

    def _note(self, name: str, node: ast.AST, **how: bool) -> None:
        self.uses.append(Use(name, f"{self._where}:{getattr(node, 'lineno', 0)}", **how))

    # -- scopes ------------------------------------------------------------------------------------------------------

    def _body(self, body: Sequence[ast.AST], outer: dict[str, str | None], params: Iterable[str] = ()) -> None:
        scope = {**outer, **dict.fromkeys(params)}
        for node in _in_scope(body):
            for name, meant in self._bound(node, scope):
                scope[name] = meant
        for node in body:
            self._visit(node, scope)

    def _bound(self, node: ast.AST, scope: dict[str, str | None]) -> Iterator[tuple[str, str | None]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                meant = None if top in OURS else alias.name if alias.asname else top
                yield alias.asname or top, meant
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            foreign = node.module.partition(".")[0] not in (*OURS, "__future__")
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}" if foreign else None
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, self._dotted(node.value, scope)

    def _dotted(self, node: ast.AST, scope: dict[str, str | None]) -> str | None:
        """The dotted name of a library that an expression is."""
        if isinstance(node, ast.Name):
            return scope.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value, scope)
            return None if owner is None else f"{owner}.{node.attr}"
        if isinstance(node, ast.Call | ast.Subscript):  # sys.modules["torch._x"], sys.modules.get("torch._x")
            called = ast.unparse(node.func if isinstance(node, ast.Call) else node.value)
            given = (node.args[0] if node.args else None) if isinstance(node, ast.Call) else node.slice
            if called in ("sys.modules", "sys.modules.get", "importlib.import_module") and isinstance(given, ast.Constant):
                return str(given.value) if str(given.value).partition(".")[0] not in OURS else None
        return None

    # -- uses --------------------------------------------------------------------------------------------------------

    def _visit(self, node: ast.AST, scope: dict[str, str | None]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            self._function(node, scope)
            return
        if isinstance(node, ast.ClassDef):
            self._class(node, scope)
            return
        if isinstance(node, ast.Attribute) and self._attribute(node, scope):
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            for _, meant in self._bound(node, scope):
                if meant is not None and is_private(meant):
                    self._note(meant, node)
        elif isinstance(node, ast.Tuple):
            self._patch(node, scope)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "of" and isinstance(node.args[0], ast.Constant):
            self._skipped.add(id(node.args[0]))  # the path of a member from self on (torch_compat/utilities/parts.py)
            path = ast.parse(f"self.{node.args[0].value}", mode="eval").body
            self._visit(ast.fix_missing_locations(ast.copy_location(path, node)), scope)
        elif isinstance(node, ast.Call):
            self._call(node, scope)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            self._skipped |= {id(part) for part in (node.left, node.right)}  # parts of names
        elif isinstance(node, ast.JoinedStr):
            self._skipped |= {id(part) for part in node.values}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._text(node, node.value)
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: dict[str, str | None]) -> None:
        arguments = node.args
        for part in (*getattr(node, "decorator_list", ()), *arguments.defaults, *(one for one in arguments.kw_defaults if one)):
            self._visit(part, scope)
        params = [part.arg for part in ast.walk(arguments) if isinstance(part, ast.arg)]
        self._body([node.body] if isinstance(node, ast.Lambda) else node.body, scope, params)

    def _class(self, node: ast.ClassDef, scope: dict[str, str | None]) -> None:
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self._visit(part, scope)
        for base in filter(None, (self._dotted(one, scope) for one in node.bases)):
            for one in node.body:
                if isinstance(one, ast.FunctionDef) and is_private(one.name):
                    self._note(f"{base}.{one.name}", one, replaced=True, own=True)
        self._body(node.body, scope)

    def _attribute(self, node: ast.Attribute, scope: dict[str, str | None]) -> bool:
        """Notes an attribute; whether nothing in it is to be looked at any more."""
        name = self._dotted(node, scope)
        replaced = isinstance(node.ctx, ast.Store | ast.Del)
        if name is not None:
            if replaced or is_private(name):
                self._note(name, node, replaced=replaced)
            return True
        if is_private(node.attr):
            self._note(node.attr, node, own=_is_own(node.value))
        return False

    def _patch(self, node: ast.Tuple, scope: dict[str, str | None]) -> None:
        """``(owner, "name", value)``, or ``(owner, "name")``."""
        if len(node.elts) in (2, 3) and isinstance(node.elts[1], ast.Constant) and isinstance(node.elts[1].value, str):
            owner, name = self._dotted(node.elts[0], scope), node.elts[1].value
            if owner is not None and name.isidentifier():
                self._note(f"{owner}.{name}", node, replaced=True)
                self._skipped.add(id(node.elts[1]))

    def _text(self, node: ast.Constant, text: str) -> None:
        if id(node) not in self._skipped and _NAME.fullmatch(text) and is_private(text):
            self._note(text, node, text=True)

    def _call(self, node: ast.Call, scope: dict[str, str | None]) -> None:
        called = self._dotted(node.func, scope)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _PARTS_OF_NAMES:
            self._skipped |= {id(part) for argument in node.args for part in ast.walk(argument)}
        if ast.unparse(node.func) in _BY_NAME and len(node.args) > 1:
            owner, name = self._dotted(node.args[0], scope), node.args[1]
            if owner is not None and isinstance(name, ast.Constant) and is_private(str(name.value)):
                self._note(f"{owner}.{name.value}", node, replaced=ast.unparse(node.func) in ("setattr", "delattr"))
                self._skipped.add(id(name))
        for keyword in node.keywords:
            if keyword.arg is not None and is_private(keyword.arg):
                self._note(f"{called}({keyword.arg})" if called else keyword.arg, node)


def _in_scope(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a scope in the order of the source, without those of functions and classes inside of it."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _in_scope(list(ast.iter_child_nodes(node)))


def sources(root: Path) -> list[Path]:
    return [path for package in OURS for path in sorted((root / package).rglob("*.py"))]


def all_uses(root: Path) -> list[Use]:
    """The uses of the packages and tools; attributes, keywords and strings may be names of our own."""
    return [use for path in sources(root) for use in uses_in(path.read_text(), str(path.relative_to(root)))]
