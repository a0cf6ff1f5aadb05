"""``xlatrain stubs``: type stubs of Lightning's import names, for editors and type checkers where Lightning is not installed.

A stub re-exports the names of our module behind an import name, so that a checker sees our types. Importing this loads neither
torch nor JAX; our modules are read, not imported.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from torch_compat.stock_names import table

_OURS = Path(__file__).resolve().parents[1]
# What stock has modules of; the rest of ours is not reached through its names.
_PARTS = {
    "accelerators", "callbacks", "cli", "core", "demos", "loggers", "loops", "overrides", "plugins", "profilers", "serve",
    "strategies", "trainer", "tuner", "utilities",
}  # fmt: skip
_FABRIC = "lightning.fabric"
_PACKAGES = {"lightning.pytorch": "torch_compat", _FABRIC: "torch_compat.fabric"}
_MARK = "# Made by `xlatrain stubs`.\n"


class _Command:
    HELP = "write type stubs, so that an editor resolves `import lightning.pytorch` without Lightning"

    def main(self, arguments: Sequence[str]) -> int:
        """Run ``xlatrain stubs …``; returns 0, or 2 where another's stubs are in the way."""
        args = _parser(self.HELP).parse_args(arguments)
        folder = Path(args.output)
        for root in table.ROOTS:
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
        path.write_text(_MARK + _stub(name, ours, below))
    return len(names)


def import_names() -> dict[str, str | None]:
    """Import name of Lightning's → our module behind it, None: made of stock's names; sorted, parents before what is below."""
    files = {
        ".".join(("torch_compat", *path.relative_to(_OURS).with_suffix("").parts)).removesuffix(".__init__")
        for path in _OURS.rglob("*.py")
    }
    hand = table.by_hand()
    candidates = {*table.stock(), *hand["modules"], *(name for name in hand["names"] if table.is_overlay(name))}
    for ours in files:
        for root, package in _PACKAGES.items():
            tail = ours.removeprefix(package)
            if ours == package or (tail.startswith(".") and (root == _FABRIC or tail.split(".")[1] in _PARTS)):
                candidates.add(root + tail)
    candidates |= {
        name.replace(root, other, 1) for other, root in table.CANONICAL.items() for name in candidates if name.startswith(root)
    }
    targets = {name: _target(name, files) for name in candidates if not _is_private(name)}
    found = {name: ours for name, ours in targets.items() if ours in files or table.canonical(name) in table.stock()}
    found = {name: ours if ours in files else None for name, ours in found.items()}
    return dict(sorted((name, ours) for name, ours in found.items() if _parents(name) <= found.keys()))


def _target(name: str, files: Collection[str]) -> str | None:
    known = table.stock().get(table.canonical(name), {})
    return _target(known["same_as"], files) if "same_as" in known else table.target_name(name)


def _parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def _stub(name: str, ours: str | None, below: Sequence[str]) -> str:
    lines: dict[str, str] = {}
    if ours is not None:
        tree = ast.parse(_source(ours))
        for one, home in (dict.fromkeys(_public(tree), ours) | _homes(tree, ours)).items():
            lines[one] = f"from {home} import {one}" + ("" if one == "*" else f" as {one}")
    section = table.by_hand()["names"].get(name, {}) if table.is_overlay(name) else {}
    for one, to in section.items():
        home, _, attribute = to.partition(":")
        lines[one] = f"{one}: Any" if to.startswith("=") else f"from {home} import {attribute} as {one}"
    for module in table.behind().get(ours or "", [name]):
        for one, line in _of_stock(module):
            lines.setdefault(one, line)
    lines |= {one: f"from . import {one} as {one}" for one in below if one not in lines}
    return "\n".join(["from typing import Any", *lines.values()]) + "\n"


def _of_stock(module: str) -> Iterator[tuple[str, str]]:
    """The public names of a module of stock's that the table gives: imported where stock imports them, or of any type."""
    hand, module = table.by_hand(), table.canonical(module)
    entry = table.stock().get(module, {})
    for origin, imported in entry.get("from", {}).items():
        for one in imported:
            attribute, _, alias = one.partition(" as ")
            if not _is_private(alias or attribute) and not _is_private(origin):
                yield alias or attribute, f"from {origin} import {attribute} as {alias or attribute}"
    said = (name for kind in ("refused", "deprecated", "removed") for name in hand[kind].get(module, {}))
    for one in (*entry.get("classes", ()), *entry.get("functions", ()), *entry.get("values", ()), *said):
        if one.isidentifier() and not one.startswith("_"):
            yield one, f"{one}: Any"


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
