"""The user's functions with a note before each of their reads, for as long as a step is captured.

A function's source is parsed, each operation on an object that may hold state of the host tells :data:`NOTES` about it, and the
result is compiled: the function has that code while a capture runs, and its own again afterwards. Source and not bytecode is
rewritten, so that it is the same on every version of Python; that what was parsed is what was loaded is checked by its code.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from xlatrain.bridge.errors import CaptureError, is_user_file, user_line

_MARK = "\ue000xlatrain.reads"  # a constant in whose place the compiled code has NOTES
_ENTERED = "\ue000enter "
_OF_THE_FRAME = frozenset({"super", "locals", "globals", "eval", "exec", "__import__"})
_OF_SOURCE = frozenset({"eval", "exec"})
_OF_THE_FRAME_ALONE = frozenset({"vars", "dir"})
"""Builtins that look at the frame of whoever calls them; the second ones only without an argument."""


class Observer(Protocol):
    """The receiver of the notes: it is told about the reads of a step."""

    @property
    def of_library(self) -> bool:
        """Whether the code that tells it something is of an installed package."""
        ...

    @of_library.setter
    def of_library(self, of_library: bool) -> None: ...

    def enter(self, key: str) -> None:
        """A function begins."""

    def attribute(self, owner: Any, name: str) -> None:
        """``owner.name`` is about to be read."""

    def entry(self, holder: Any, key: Any) -> None:
        """``holder[key]`` is about to be read."""

    def value(self, value: Any) -> None:
        """All that is in ``value`` may be read: it is compared, iterated over, asked for its truth or length."""

    def stores(self, owner: Any, name: str) -> None:
        """``owner.name`` is about to be assigned or deleted."""

    def fills(self, holder: Any) -> None:
        """``holder[…]`` is about to be assigned or deleted."""

    def call(self, function: Any) -> Any:
        """``function`` is about to be called; what is called instead."""

    def member(self, item: Any, holder: Any) -> None:
        """Whether ``item`` is in ``holder`` is about to be asked."""

    def source(self, source: Any, names: dict[str, Any], variables: Mapping[str, Any]) -> None:
        """``eval`` or ``exec`` is about to run ``source`` with these global and local variables."""


class _Receiver:
    """The observer of this moment, if there is one, and its thread."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.thread = 0
        self.busy = False


class _Notes:
    """The object that instrumented code calls; nothing happens but in the thread and in the time of an observation.

    Nor does anything while the observer itself works: what it asks an object may run code with notes.
    """

    slice = slice

    def __init__(self, receiver: _Receiver, *, of_library: bool) -> None:
        self._receiver = receiver
        self._of_library = of_library

    def _tell(self, what: str, *args: Any) -> Any:
        receiver = self._receiver
        observer = receiver.observer
        if observer is None or receiver.busy or threading.get_ident() != receiver.thread:
            return args[0]
        receiver.busy = True
        observer.of_library = self._of_library
        try:
            return getattr(observer, what)(*args)
        except Exception as error:  # a read that is not known must not be missed
            if isinstance(error, CaptureError):
                raise
            raise CaptureError(
                f"{user_line(traceback.extract_stack()) or 'the step'}\n  cannot be captured: what it reads of a "
                f"{type(args[0]).__qualname__} could not be followed ({type(error).__name__}: {error}).\n  Fix: read it in a "
                "hook such as on_train_batch_start, and keep it as an attribute of the module."
            ) from error
        finally:
            receiver.busy = False

    def enter(self, key: str) -> None:
        self._tell("enter", key)

    def attribute(self, owner: Any, name: str) -> Any:
        self._tell("attribute", owner, name)
        return owner

    def entry(self, holder: Any, key: Any) -> Any:
        self._tell("entry", holder, key)
        return holder[key]

    def value(self, value: Any) -> Any:
        self._tell("value", value)
        return value

    def stores(self, owner: Any, name: str) -> Any:
        self._tell("stores", owner, name)
        return owner

    def changes(self, owner: Any, name: str) -> Any:
        self._tell("attribute", owner, name)
        self._tell("stores", owner, name)
        return owner

    def fills(self, holder: Any) -> Any:
        self._tell("fills", holder)
        return holder

    def updates(self, holder: Any) -> Any:
        self._tell("value", holder)
        self._tell("fills", holder)
        return holder

    def call(self, function: Any) -> Any:
        return self._tell("call", function)

    def source(self, source: Any, *around: Any) -> tuple[Any, ...]:
        frame = sys._getframe(1)
        names = around[0] if around and around[0] is not None else frame.f_globals
        variables = around[1] if len(around) > 1 and around[1] is not None else frame.f_locals
        self._tell("source", source, names, variables)
        return source, *around

    def contains(self, item: Any, holder: Any) -> Any:
        self._tell("member", item, holder)
        return item in holder


@contextlib.contextmanager
def observed_through(wrapped: Callable[[Observer], Observer]) -> Iterator[None]:
    """Within the block, the observer of this moment is told through another one, if there is one."""
    before = RECEIVER.observer
    if before is not None:
        RECEIVER.observer = wrapped(before)
    try:
        yield
    finally:
        RECEIVER.observer = before


RECEIVER = _Receiver()
NOTES = _Notes(RECEIVER, of_library=False)
LIBRARY_NOTES = _Notes(RECEIVER, of_library=True)


class _Rewriter(ast.NodeTransformer):
    """Puts the notes into a module's tree."""

    def __init__(self, filename: str) -> None:
        self._filename = filename
        self._classes: list[str] = []
        self._count = 0

    @staticmethod
    def _note(name: str, *args: ast.expr) -> ast.Call:
        place = args[0] if args else None
        call = ast.Call(ast.Attribute(ast.Constant(_MARK), name, ast.Load()), list(args), [])
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
        return self._note("enter", ast.copy_location(ast.Constant(f"{_ENTERED}{self._filename}:{self._count}"), place))

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
        made = ast.copy_location(ast.Attribute(ast.copy_location(ast.Constant(_MARK), node), "slice", ast.Load()), node)
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
        self.generic_visit(node)
        if not own:
            node.func = self._note("call", node.func)
        elif isinstance(function, ast.Name) and function.id in _OF_SOURCE and node.args:
            node.args = [ast.copy_location(ast.Starred(self._note("source", *node.args), ast.Load()), node)]
        for keyword in node.keywords:
            if keyword.arg is None:
                keyword.value = self._value(keyword.value)
        return node

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

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        node.left, node.right = self._value(node.left), self._value(node.right)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        node.operand = self._value(node.operand)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        node.values = [self._value(one) for one in node.values]
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

    def visit_With(self, node: ast.With | ast.AsyncWith) -> Any:
        self.generic_visit(node)
        for item in node.items:
            item.context_expr = self._value(item.context_expr)
        return node

    visit_AsyncWith = visit_With

    def _visit_tested(self, node: Any) -> Any:
        self.generic_visit(node)
        node.test = self._value(node.test)
        return node

    visit_If = visit_While = visit_IfExp = visit_Assert = _visit_tested

    def _visit_iterating(self, node: Any) -> Any:
        self.generic_visit(node)
        node.iter = self._value(node.iter)
        if isinstance(node, ast.comprehension):
            node.ifs = [self._value(one) for one in node.ifs]
        return node

    visit_For = visit_AsyncFor = visit_comprehension = _visit_iterating

    def _visit_single(self, node: Any) -> Any:
        self.generic_visit(node)
        if getattr(node, "value", None) is not None and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            node.value = self._value(node.value)
        return node

    visit_Starred = visit_FormattedValue = visit_YieldFrom = _visit_single

    def visit_Match(self, node: ast.Match) -> Any:
        self.generic_visit(node)
        node.subject = self._value(node.subject)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.target = self.visit(node.target)
        node.value = None if node.value is None else self.visit(node.value)
        return node  # an annotation of a local variable is not evaluated

    def visit_MatchValue(self, node: ast.MatchValue) -> Any:
        return node  # a pattern must stay a name with dots


class _File:
    """A source file's functions, as they are loaded and with notes."""

    def __init__(self, filename: str, source: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source, filename)
            loaded = compile(tree, filename, "exec", dont_inherit=True)
            tree = ast.fix_missing_locations(_Rewriter(filename).visit(ast.parse(source, filename)))
            noted = compile(tree, filename, "exec", dont_inherit=True)
        self._found: dict[tuple[str, int], list[tuple[types.CodeType, types.CodeType]]] = {}
        notes = NOTES if is_user_file(filename) else LIBRARY_NOTES
        for before, after in _pairs(loaded, noted, notes):
            self._found.setdefault((before.co_qualname, before.co_firstlineno), []).append((before, after))

    def noted(self, code: types.CodeType) -> types.CodeType | None:
        """The code of a function with notes; None where the file has another one now."""
        found = self._found.get((code.co_qualname, code.co_firstlineno), ())
        for before, after in found:
            if _are_same(before, code) and list(before.co_positions())[-1:] == list(code.co_positions())[-1:]:
                return after
        rewritten = any(name.startswith("@py") for name in (*code.co_names, *code.co_varnames))  # pytest's asserts
        if rewritten and len(found) == 1 and found[0][0].co_freevars == code.co_freevars:
            return found[0][1]
        return None


def _are_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two codes do the same: a file may have been edited since it was imported, if only in a number."""
    alike = one.co_code == other.co_code and one.co_names == other.co_names and len(one.co_consts) == len(other.co_consts)
    return alike and all(map(_is_same_constant, one.co_consts, other.co_consts))


def _is_same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, types.CodeType) and isinstance(other, types.CodeType):
        return _are_same(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same_constant, one, other))
    if isinstance(one, float | complex):
        return type(one) is type(other) and repr(one) == repr(other)
    return type(one) is type(other) and one == other


def _pairs(before: types.CodeType, after: types.CodeType, notes: _Notes) -> Iterator[tuple[types.CodeType, types.CodeType]]:
    """Each code of a module and the one that stands for it."""
    ours = [one for one in after.co_consts if isinstance(one, types.CodeType)]
    theirs = [one for one in before.co_consts if isinstance(one, types.CodeType)]
    if len(ours) != len(theirs):
        return
    for one, other in zip(theirs, ours, strict=True):
        yield one, _with_notes(other, notes)
        yield from _pairs(one, other, notes)


def _with_notes(code: types.CodeType, notes: _Notes) -> types.CodeType:
    def constant(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _with_notes(value, notes)
        return notes if type(value) is str and value == _MARK else value

    return code.replace(co_consts=tuple(map(constant, code.co_consts)))


@functools.lru_cache(maxsize=256)
def _file(filename: str, length: int) -> _File | None:
    lines = linecache.getlines(filename)
    try:
        return _File(filename, "".join(lines)) if length else None
    except (SyntaxError, ValueError, RecursionError):
        return None


_noted: dict[int, tuple[types.CodeType, types.CodeType | None]] = {}  # by id of the first, which is kept


def noted_code(code: types.CodeType) -> types.CodeType | None:
    """The code with notes; None where the source that it was compiled from is not there any more."""
    found = _noted.get(id(code))
    if found is None:
        file = _file(code.co_filename, len(linecache.getlines(code.co_filename)))
        found = _noted[id(code)] = (code, None if file is None else file.noted(code))
    return found[1]


class Instrumented:
    """Functions that have the code with notes, for as long as it is entered.

    Args:
        observer: is told about the reads.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._own: dict[types.FunctionType, types.CodeType] = {}
        self._keys: dict[str, list[types.FunctionType]] = {}
        self.without_source: dict[types.FunctionType, None] = {}

    def add(self, function: types.FunctionType) -> bool:
        """Give a function its notes; False if there is no source to take them from."""
        if function in self._own:
            return True
        if function in self.without_source:
            return False
        code = function.__code__
        if _key_of(code):  # made by a function with notes
            return True
        noted = noted_code(code)
        if noted is None or noted.co_freevars != code.co_freevars:
            self.without_source[function] = None
            return False
        self._own[function] = code
        function.__code__ = noted
        self._keys.setdefault(_key_of(noted), []).append(function)
        return True

    def entered(self, key: str) -> list[types.FunctionType]:
        """The functions of which a note of :meth:`Observer.enter` may be; none where the step has made it."""
        return self._keys.get(key, [])

    def key_of(self, function: types.FunctionType) -> str:
        """The key that a function with notes enters with."""
        return _key_of(function.__code__)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """The context of the observer's own work outside of a note: what that asks an object may run code with notes."""
        before, RECEIVER.busy = RECEIVER.busy, True
        try:
            yield
        finally:
            RECEIVER.busy = before

    @property
    def functions(self) -> dict[types.FunctionType, types.CodeType]:
        """The functions that have notes, with their own code."""
        return self._own

    def __enter__(self) -> Instrumented:
        self._before = RECEIVER.observer, RECEIVER.thread
        RECEIVER.observer, RECEIVER.thread = self._observer, threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        RECEIVER.observer, RECEIVER.thread = self._before
        for function, code in self._own.items():
            function.__code__ = code


def _key_of(code: types.CodeType) -> str:
    return next((one for one in code.co_consts if type(one) is str and one.startswith(_ENTERED)), "")
