"""The first line of every docstring names its subject: it opens with no word that stands for something said elsewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("xlatrain", "torch_compat")
WITHOUT_SUBJECT = frozenset(["it", "its", "one", "ones", "what", "of", "as", "that", "those", "these", "whose", "whatever"])


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def first_word(text: str) -> str:
    """The first word, in lower case, whatever punctuation stands before it; empty where code in backticks comes first."""
    found = re.match(r"[^\w`]*(\w+)", text)
    return found.group(1).lower() if found else ""


def test_first_word_is_found() -> None:
    source = '"""*What* it does."""\ndef f():\n    """``of(x)``, a value."""\nclass C:\n    """One-way street."""\n'
    assert [(line, first_word(text)) for line, text in docstrings(source)] == [(1, "what"), (3, ""), (5, "one")]


def test_docstrings_name_their_subject() -> None:
    found: list[str] = []
    count = 0
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for line, text in docstrings(path.read_text()):
                count += 1
                if first_word(text) in WITHOUT_SUBJECT:
                    found.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert count > 1000
    assert not found, "begin with the subject (a noun, or a verb in the imperative):\n" + "\n".join(found)
