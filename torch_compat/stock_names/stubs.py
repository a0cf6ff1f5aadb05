"""``xlatrain stubs``: type stubs of Lightning's import names, for editors and type checkers where Lightning is not installed.

A stub re-exports the names of our module behind an import name, so that a checker sees our types. Importing this loads neither
torch nor JAX; our modules are read, not imported.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_compat.stock_names import aliases

_OURS = Path(__file__).resolve().parents[1]
# What stock has modules of; the rest of ours is not reached through its names.
_PARTS = {
    "accelerators", "callbacks", "cli", "core", "demos", "loggers", "loops", "overrides", "plugins", "profilers", "serve",
    "strategies", "trainer", "tuner", "utilities",
}  # fmt: skip
_ROOTS = {"lightning.pytorch": "torch_compat", "pytorch_lightning": "torch_compat"}
_FABRIC_ROOTS = {"lightning.fabric": "torch_compat.fabric", "lightning_fabric": "torch_compat.fabric"}
_ERAS_ROOT = "torch_compat.legacy.root"  # has the names of torch_compat too
_MARK = "# Made by `xlatrain stubs`.\n"


class _Command:
    HELP = "write type stubs, so that an editor resolves `import lightning.pytorch` without Lightning"

    def main(self, arguments: Sequence[str]) -> int:
        """Run ``xlatrain stubs …``; returns 0, or 2 where another's stubs are in the way."""
        args = _parser(self.HELP).parse_args(arguments)
        folder = Path(args.output)
        for root in aliases.ROOTS:
            beginning = folder / root / "__init__.pyi"
            if (folder / root).exists() and not (beginning.is_file() and beginning.read_text().startswith(_MARK)):
                print(
                    f"xlatrain stubs: {folder / root} was not made by this command: move it, or take another --output",
                    file=sys.stderr,
                )
                return 2
        written = write_stubs(folder)
        print(f"wrote {written} stubs into {folder}: pyright and Pylance read the folder typings by themselves;")
        print(f"mypy with mypy_path = {folder}, PyCharm when it is marked as a sources root")
        return 0


COMMAND = _Command()


def write_stubs(folder: Path) -> int:
    """Write the stubs of ``lightning``, ``pytorch_lightning`` and ``lightning_fabric`` below a folder.

    Returns:
        The number of files.
    """
    names = import_names()
    for name, ours in names.items():
        path = folder.joinpath(*name.split("."), "__init__.pyi")
        path.parent.mkdir(parents=True, exist_ok=True)
        below = sorted(other.rpartition(".")[2] for other in names if other.rpartition(".")[0] == name)
        path.write_text(_MARK + _stub(ours, below))
    return len(names)


def import_names() -> dict[str, str]:
    """Import name of Lightning's → our module behind it, sorted; parents come before what is below them."""
    files = {
        ".".join(("torch_compat", *path.relative_to(_OURS).with_suffix("").parts)).removesuffix(".__init__")
        for path in _OURS.rglob("*.py")
    }
    candidates = {"lightning", *aliases._OLD_PATHS}
    for ours in files | set(aliases._MOVED):
        for roots, parts in ((_ROOTS, _PARTS), (_FABRIC_ROOTS, set())):
            for root, package in roots.items():
                tail = ours.removeprefix(package)
                if ours == package or (tail.startswith(".") and (not parts or tail.split(".")[1] in parts)):
                    candidates.add(root + tail)
    targets = {name: aliases.target_name(name) for name in candidates}
    found = {name: ours for name, ours in targets.items() if ours in files and not _is_private(name)}
    return dict(sorted((name, ours) for name, ours in found.items() if _parents(name) <= found.keys()))


def _parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def _stub(ours: str, below: Sequence[str]) -> str:
    tree = ast.parse(_source(ours))
    homes = dict.fromkeys(_public(tree), ours) | _homes(tree, ours)
    if ours == _ERAS_ROOT:
        homes = _homes(ast.parse(_source("torch_compat")), "torch_compat") | homes
    lines = [f"from {home} import {name}" + ("" if name == "*" else f" as {name}") for name, home in homes.items()]
    lines += [f"from . import {name} as {name}" for name in below if name not in homes]
    makes_names = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    if makes_names and not _homes(tree, ours):  # what it makes when asked, refused names among them, cannot be read
        lines += ["from typing import Any", "def __getattr__(name: str) -> Any: ..."]
    return "\n".join(lines) + "\n"


def _homes(tree: ast.Module, ours: str) -> dict[str, str]:
    """The table of a module that imports its names when they are asked for: name → where it is defined."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            table: dict[str, str] = ast.literal_eval(node.value)
            return {name: home if "." in home or home == "torch_compat" else f"{ours}.{home}" for name, home in table.items()}
    return {}


def _source(ours: str) -> str:
    path = _OURS.joinpath(*ours.split(".")[1:])
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


def _public(tree: ast.Module) -> Iterator[str]:
    """The names without underscore that a module defines or imports, for type checkers or for all."""
    statements = list(tree.body)
    while statements:
        node = statements.pop(0)
        if isinstance(node, ast.If | ast.Try):
            statements[:0] = node.body
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [target.id for target in targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch_compat":
            found = [alias.asname or alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in found if not name.startswith("_") or name == "__version__")


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xlatrain stubs", description=description)
    parser.add_argument("--output", default="typings", metavar="FOLDER", help="where to (default: typings)")
    return parser
