"""Every name of torch and JAX that the packages use is there in the installed releases; many are internals that may go."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "jax")
ASKED_FOR = {  # by the code itself, before it uses them
    "jax.scipy.special.erfcx",  # since JAX 0.10.1
}
OURS = "torch.ops.xlatrain."


def bindings(tree: ast.AST) -> dict[str, str]:
    """Local name → dotted name in torch or JAX, for what a file imports of them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in LIBRARIES:
                    top = alias.name.partition(".")[0]
                    found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in LIBRARIES:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def used(path: Path) -> Iterator[tuple[str, str]]:
    """(dotted name, ``file:line``) of each use."""
    tree = ast.parse(path.read_text())
    bound = bindings(tree)
    where = path.relative_to(ROOT)
    yield from ((name, str(where)) for name in bound.values())
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in bound:
            yield ".".join([bound[inner.id], *parts]), f"{where}:{getattr(node, 'lineno', 0)}"


def resolve(name: str) -> Any:
    """The object of a dotted name; modules on the way are imported."""
    path, *rest = name.split(".")
    value: Any = importlib.import_module(path)
    for part in rest:
        path = f"{path}.{part}"
        if path in sys.modules:  # torch.multiprocessing.spawn is also a function
            value = sys.modules[path]
        else:
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(path)
    return value


def test_every_name_of_torch_and_jax_that_is_used_is_there() -> None:
    uses: dict[str, str] = {}
    for path in (path for folder in ("xlatrain", "torch_compat", "tools") for path in (ROOT / folder).rglob("*.py")):
        for name, where in used(path):
            uses.setdefault(name, where)
    assert {"torch._C._get_dispatch_mode", "jax._src.distributed.global_state"} <= uses.keys()
    missing = []
    for name in sorted(uses.keys() - ASKED_FOR):
        if name.startswith(OURS):
            continue
        try:
            resolve(name)
        except (AttributeError, ImportError) as error:
            missing.append(f"{uses[name]}: {name}: {error}")
    assert missing == []
