"""``xlatrain examples``: the example scripts and notebooks, listed and copied."""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from xlatrain.cli.shipped import folder

HELP = "list the examples, or copy some into a folder"


def main(arguments: Sequence[str]) -> int:
    """Run ``xlatrain examples …``; returns 0, or 2 where nothing was copied."""
    args = _parser().parse_args(arguments)
    try:
        found = {path.name: path for path in sorted(folder("examples").iterdir()) if path.suffix in (".py", ".ipynb")}
    except FileNotFoundError as error:
        print(f"xlatrain examples: {error}", file=sys.stderr)
        return 2
    if not args.name:
        for name, path in found.items():
            print(f"{name:<26} {_summary(path)}")
        print("\nTo copy one: xlatrain examples NAME")
        return 0
    target = Path(args.into)
    if unknown := [name for name in args.name if name not in found]:
        print(f"xlatrain examples: there is no {', '.join(unknown)}. Choose from {', '.join(found)}.", file=sys.stderr)
        return 2
    if there := [str(target / name) for name in args.name if (target / name).exists()]:
        print(f"xlatrain examples: {', '.join(there)} is there already: take another folder by --into", file=sys.stderr)
        return 2
    target.mkdir(parents=True, exist_ok=True)
    for name in args.name:
        print(f"wrote {shutil.copyfile(found[name], target / name)}")
    return 0


def _summary(path: Path) -> str:
    """The first sentence of a script's docstring, or the title of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "".join(json.loads(text)["cells"][0]["source"]).splitlines()[0].lstrip("# ")
    return " ".join((ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="xlatrain examples", description=HELP)
    parser.add_argument("name", nargs="*", help="those to copy; none: list all")
    parser.add_argument("--into", default=".", metavar="FOLDER", help="where to (default: the current folder)")
    return parser
