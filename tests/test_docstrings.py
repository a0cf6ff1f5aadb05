"""The first line of every docstring names its subject, and the arguments and attributes that a docstring describes are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("xlatrain", "torch_compat")
WITHOUT_SUBJECT = frozenset(["it", "its", "one", "ones", "what", "of", "as", "that", "those", "these", "whose", "whatever"])
Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(source: str) -> Iterator[tuple[Documented, str]]:
    """The module, the classes and the functions of a file that have docstrings, with these."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, text


def sources() -> Iterator[tuple[str, str]]:
    """(path from the root, source) of every file of the packages."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def first_word(text: str) -> str:
    """The first word, in lower case, whatever punctuation stands before it; empty where code in backticks comes first."""
    found = re.match(r"[^\w`]*(\w+)", text)
    return found.group(1).lower() if found else ""


def entries(text: str, section: str) -> list[str]:
    """The names that a section such as ``Args:`` describes: ``name: …`` or ``name, other: …``."""
    block = re.search(rf"^{section}:\n((?: {{4}}.*(?:\n|$)|\n)+)", text, re.MULTILINE)
    lines = block.group(1).splitlines() if block else []
    found = [re.match(r" {4}((?:\*{0,2}\w+, )*\*{0,2}\w+):", line) for line in lines]
    return [name.strip(" *") for match in found if match for name in match.group(1).split(",")]


def parameters(node: Documented) -> set[str] | None:
    """The parameters of a function, or of a class's constructor; None where it has none of its own, or takes any."""
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__new__")]
        return parameters(made[0]) if made else None
    if isinstance(node, ast.Module) or node.args.kwarg is not None:
        return None
    args = node.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, *([args.vararg] if args.vararg else [])]
    return {arg.arg for arg in named}


def attributes(node: ast.ClassDef) -> set[str]:
    """The names that a class defines in its body, or assigns to in one of its methods, as ``self.name``."""
    inside = list(ast.walk(node))
    methods = {one.name for one in inside if isinstance(one, ast.FunctionDef)}
    names = {one.id for one in inside if isinstance(one, ast.Name)}
    return methods | names | {one.attr for one in inside if isinstance(one, ast.Attribute)}


def test_helpers() -> None:
    source = '"""*What* it does."""\ndef f(x):\n    """``of(x)``.\n\n    Args:\n        x: a value.\n        y, z: no more."""\n'
    source += 'class C:\n    """One-way street.\n\n    Attributes:\n        a: here.\n        b: not here.\n    """\n    a = 1\n'
    (_, module), (function, text), (kind, of_class) = documented(source)
    assert [first_word(one) for one in (module, text, of_class)] == ["what", "", "one"]
    assert entries(text, "Args") == ["x", "y", "z"] and parameters(function) == {"x"}
    assert isinstance(kind, ast.ClassDef)
    assert set(entries(of_class, "Attributes")) - attributes(kind) == {"b"}


def test_docstrings_name_their_subject() -> None:
    found = [(path, node, text) for path, source in sources() for node, text in documented(source)]
    assert len(found) > 1000
    wrong = [
        f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for path, node, text in found
        if first_word(text) in WITHOUT_SUBJECT
    ]
    assert not wrong, "begin with the subject (a noun, or a verb in the imperative):\n" + "\n".join(wrong)


def test_what_docstrings_describe_is_there() -> None:
    wrong: list[str] = []
    count = 0
    for path, source in sources():
        for node, text in documented(source):
            known = parameters(node)
            described = [] if known is None else entries(text, "Args")
            missing = set(described) - (known or set())
            if isinstance(node, ast.ClassDef):
                described += (named := entries(text, "Attributes"))
                missing |= set(named) - attributes(node)
            count += len(described)
            if missing:
                wrong.append(f"{path}:{getattr(node, 'lineno', 1)}: {', '.join(sorted(missing))}")
    assert count > 1000
    assert not wrong, "arguments or attributes that are described and not there:\n" + "\n".join(wrong)


def test_code_in_docstrings_has_two_backticks() -> None:
    """Roles such as ``:class:`X``` have one."""
    single = []
    for path, source in sources():
        for node, text in documented(source):
            plain = re.sub(r"``.+?``|:\w+:`[^`]+`|`[^`]+ <[^>]+>`_", "", text, flags=re.S)
            single += [f"{path}:{getattr(node, 'lineno', 1)}: {one}" for one in re.findall(r"`[^`\n]+`", plain)]
    assert single == []
