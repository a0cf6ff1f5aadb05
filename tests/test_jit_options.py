"""Every program is compiled with the options that its mesh needs, or says beside its ``jax.jit`` why it has none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REASON = "# without compiler_options: "


def without_options(source: str) -> Iterator[int]:
    """Lines of ``jax.jit`` in ``source`` that has no ``compiler_options``, and no reason in its lines or on the one before."""
    tree, lines = ast.parse(source), source.splitlines()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    call_of = {id(part): call for call in calls for part in (call.func, *call.args)}  # jax.jit(…), partial(jax.jit, …)
    for node in ast.walk(tree):
        if "jit" in (getattr(node, "id", None), getattr(node, "attr", None)) and ast.unparse(node) in ("jax.jit", "jit"):
            call = call_of.get(id(node))
            if call is not None and any(keyword.arg == "compiler_options" for keyword in call.keywords):
                continue
            first, last = (call or node).lineno, (call or node).end_lineno
            before = lines[first - 2].lstrip() if first > 1 else ""
            if not before.startswith(REASON) and not any(REASON in line for line in lines[first - 1 : last]):
                yield node.lineno


def test_what_has_neither_is_found() -> None:
    source = f"""
program = jax.jit(step, compiler_options=options)

program = jax.jit(step)

@jax.jit  {REASON}sums alone
def total(x): ...

@functools.partial(jax.jit, static_argnums=1)
def scaled(x, factor): ...

{REASON}copies alone
@functools.partial(jax.jit, static_argnums=1)
def cut(x, size): ...

@jit
def bare(x): ...
"""
    assert sorted(without_options(source)) == [4, 9, 16]


def test_every_program_has_options_or_says_why_not() -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in ("xlatrain", "torch_compat")
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in without_options(path.read_text())
    ]
    assert missing == [], (
        "give jax.jit compiler_options=xlatrain.xla.compiler_options.compiler_options(mesh), or a reason as a comment"
    )
