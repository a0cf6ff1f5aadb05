"""The rewriter of source: a note is put before each operation on an object that may hold state of the host."""

from __future__ import annotations

import ast
from typing import Any

MARK = "\ue000xlatrain.reads"  # a constant in whose place the compiled code has its notes
ENTERED = "\ue000enter "
_OF_THE_FRAME = frozenset({"super", "locals", "globals", "eval", "exec", "__import__"})
_OF_SOURCE = frozenset({"eval", "exec"})
_OF_THE_FRAME_ALONE = frozenset({"vars", "dir"})
"""Builtins that look at the frame of whoever calls them; the second ones only without an argument."""
_READ_WHOLE: dict[type[ast.AST], tuple[str, ...]] = {
    ast.BinOp: ("left", "right"),
    ast.UnaryOp: ("operand",),
    ast.BoolOp: ("values",),
    **dict.fromkeys((ast.If, ast.While, ast.IfExp, ast.Assert), ("test",)),
    **dict.fromkeys((ast.For, ast.AsyncFor), ("iter",)),
    ast.comprehension: ("iter", "ifs"),
    ast.withitem: ("context_expr",),
    ast.Match: ("subject",),
    **dict.fromkeys((ast.Starred, ast.YieldFrom), ("value",)),
}
"""Nodes, and the parts of them of which all may be read."""
_LOAD = ast.Load()
_ARGUMENT = "is_argument"
"""The attribute of a text's node that is an argument of a call."""


def _is_text(node: ast.AST) -> bool:
    """Whether an expression formats values into a text: ``f"{x}"``, ``"%d" % x``, ``"{}".format(x)``; or may do so: ``x % y``."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod) and not (
            isinstance(node.left, ast.Constant) and type(node.left.value) in (int, float)
        )
    if isinstance(node, ast.Call):
        owner = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "format" else None
        return isinstance(owner, ast.Constant) and isinstance(owner.value, str)
    return isinstance(node, ast.JoinedStr)


class Rewriter(ast.NodeTransformer):
    """Puts the notes into a module's tree."""

    def __init__(self, filename: str) -> None:
        self._filename = filename
        self._classes: list[str] = []
        self._count = 0

    @staticmethod
    def _note(name: str, *args: ast.expr) -> ast.Call:
        place = args[0] if args else None
        call = ast.Call(ast.Attribute(ast.Constant(MARK), name, ast.Load()), list(args), [])
        if place is not None:
            for node in (call, call.func, call.func.value):  # pyright: ignore[reportAttributeAccessIssue]
                ast.copy_location(node, place)
            for arg in args[1:]:
                if not hasattr(arg, "lineno"):
                    ast.copy_location(arg, place)
        return call

    def _value(self, node: ast.expr) -> ast.expr:
        """``node``, of which all may be read; its parts have been visited."""
        plain = (ast.Constant, ast.Compare, ast.JoinedStr, ast.Lambda, ast.FormattedValue)
        negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        return node if isinstance(node, plain) or negated else self._note("value", node)

    def _mangled(self, name: str) -> str:
        if name.startswith("__") and not name.endswith("__") and self._classes and self._classes[-1].strip("_"):
            return f"_{self._classes[-1].lstrip('_')}{name}"
        return name

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in _READ_WHOLE.get(type(node), ()):
            held = getattr(node, name)
            if isinstance(held, list):
                setattr(node, name, [self._value(one) for one in held])
            elif held is not None and isinstance(getattr(node, "ctx", _LOAD), ast.Load):
                setattr(node, name, self._value(held))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
        self.generic_visit(node)
        first = node.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
        enter = ast.copy_location(ast.Expr(self._enter(first)), first)
        node.body.insert(1 if documented else 0, enter)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        self.generic_visit(node)
        body = ast.BoolOp(ast.Or(), [self._enter(node.body), node.body])  # the note gives None
        node.body = ast.copy_location(body, node.body)
        return node

    def _enter(self, place: ast.AST) -> ast.expr:
        self._count += 1
        return self._note("enter", ast.copy_location(ast.Constant(f"{ENTERED}{self._filename}:{self._count}"), place))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        owner = node.value
        if (
            isinstance(owner, ast.Call)
            and isinstance(owner.func, ast.Name)
            and owner.func.id == "super"
            and not isinstance(node.ctx, ast.Load)
        ):
            return node
        kind = "attribute" if isinstance(node.ctx, ast.Load) else "stores"
        node.value = self._note(kind, owner, ast.Constant(self._mangled(node.attr)))
        return node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            node.value = self._note("fills", node.value)
            return node
        return ast.copy_location(self._note("entry", node.value, self._key(node.slice)), node)

    def _key(self, node: ast.expr) -> ast.expr:
        """An index as an expression."""
        if isinstance(node, ast.Tuple):
            node.elts = [self._key(one) for one in node.elts]
            return node
        if not isinstance(node, ast.Slice):
            return node
        parts = [
            ast.copy_location(ast.Constant(None), node) if one is None else one for one in (node.lower, node.upper, node.step)
        ]
        made = ast.copy_location(ast.Attribute(ast.copy_location(ast.Constant(MARK), node), "slice", ast.Load()), node)
        return ast.copy_location(ast.Call(made, parts, []), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        target = node.target
        self.generic_visit(node)
        if isinstance(target, ast.Name):
            read = ast.copy_location(ast.Name(target.id, ast.Load()), target)
            noted = ast.copy_location(ast.Expr(self._note("updates", read)), node)
            node.value = self._value(node.value)
            return [noted, node]
        if isinstance(target, ast.Attribute):
            assert isinstance(target.value, ast.Call)
            if target.value.args:  # not super()
                target.value = self._note("changes", *target.value.args)
        elif isinstance(target, ast.Subscript):
            assert isinstance(target.value, ast.Call)
            target.value = self._note("updates", *target.value.args)
        node.value = self._value(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        function = node.func
        own = isinstance(function, ast.Name) and function.id in _OF_THE_FRAME
        own |= isinstance(function, ast.Name) and function.id in _OF_THE_FRAME_ALONE and not node.args
        texts = [one for one in node.args if _is_text(one)]
        for one in texts:
            setattr(one, _ARGUMENT, True)
        self.generic_visit(node)
        if hasattr(node, _ARGUMENT):  # "{}".format(…)
            node.args = [one if isinstance(one, ast.Starred) else self._note("said", one) for one in node.args]
        if not own:
            node.func = self._note("saying" if texts else "call", node.func)
        elif isinstance(function, ast.Name) and function.id in _OF_SOURCE and node.args:
            node.args = [ast.copy_location(ast.Starred(self._note("source", *node.args), ast.Load()), node)]
        for keyword in node.keywords:
            if keyword.arg is None:
                keyword.value = self._value(keyword.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if not _is_text(node):
            return node
        is_argument = ast.Constant(hasattr(node, _ARGUMENT))
        return ast.copy_location(self._note("formats", node.left, node.right, is_argument), node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Any:
        node.value = self._value(self.visit(node.value))
        if node.format_spec is not None:
            self.generic_visit(node.format_spec)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        self.generic_visit(node)
        if hasattr(node, _ARGUMENT):
            for one in node.values:
                if isinstance(one, ast.FormattedValue):
                    one.value = self._note("said", one.value)
        return self._note("text", node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn):
            asked = ast.copy_location(self._note("contains", node.left, node.comparators[0]), node)
            return asked if isinstance(node.ops[0], ast.In) else ast.copy_location(ast.UnaryOp(ast.Not(), asked), node)
        if all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops):
            return node
        node.left = self._value(node.left)
        node.comparators = [self._value(one) for one in node.comparators]
        return node

    def visit_Dict(self, node: ast.Dict) -> Any:
        self.generic_visit(node)
        node.values = [one if key is not None else self._value(one) for key, one in zip(node.keys, node.values, strict=True)]
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        if any(isinstance(one, ast.Tuple | ast.List) for one in node.targets):
            node.value = self._value(node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.target = self.visit(node.target)
        node.value = None if node.value is None else self.visit(node.value)
        return node  # an annotation of a local variable is not evaluated

    # A pattern's values, keys and classes must stay names with dots.

    def visit_MatchValue(self, node: ast.MatchValue) -> Any:
        return node

    def visit_MatchMapping(self, node: ast.MatchMapping) -> Any:
        node.patterns = [self.visit(one) for one in node.patterns]
        return node

    def visit_MatchClass(self, node: ast.MatchClass) -> Any:
        node.patterns = [self.visit(one) for one in node.patterns]
        node.kwd_patterns = [self.visit(one) for one in node.kwd_patterns]
        return node
