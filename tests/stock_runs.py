"""What scripts came to under stock Lightning, kept in ``.cache/stock`` by all that decides about it.

That is the script with its arguments, what it imports from its folder and from the checkout, and the releases of all packages.
``rm -r .cache/stock`` has everything run again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / ".cache" / "stock"
_OURS = ("torch_compat", "xlatrain")
_DAYS = 30
"""What nobody has used for so long is removed."""


def kept_result(
    script: Path, arguments: Sequence[str], run: Callable[[], Any], is_kept: Callable[[Any], bool] = lambda _: True
) -> Any:
    """What ``run()`` gives, a value of JSON: the script with these arguments under stock, now or in an earlier test run.

    Args:
        script: what runs.
        arguments: all else that the result depends on.
        run: runs it.
        is_kept: whether a result is there for later test runs.
    """

    def write(folder: Path) -> bool:
        result = run()
        (folder / "result.json").write_text(json.dumps(result))
        return is_kept(result)

    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), script, arguments, write)
        return json.loads((Path(folder) / "result.json").read_text())


def fill(folder: Path, script: Path, arguments: Sequence[str], run: Callable[[Path], bool]) -> None:
    """Put into ``folder``, which is empty, what ``run(folder)`` writes there; see :func:`kept_result`.

    Args:
        run: returns whether that is kept.
    """
    kept = _place(script, arguments)
    if kept is not None and kept.is_dir():
        shutil.copytree(kept, folder, dirs_exist_ok=True, symlinks=True)
        os.utime(kept)
        return
    if not run(folder) or kept is None:
        return
    STORE.mkdir(parents=True, exist_ok=True)
    for old in STORE.iterdir():
        with suppress(FileNotFoundError):  # another process removes it, too
            if time.time() - old.stat().st_mtime > _DAYS * 86400:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=STORE) as beside:
        whole = Path(beside) / "whole"
        shutil.copytree(folder, whole, symlinks=True)
        with suppress(OSError):  # another process has put it there
            whole.rename(kept)


def _place(script: Path, arguments: Sequence[str]) -> Path | None:
    sources = sources_of(script)
    if sources is None:
        return None
    key = hashlib.sha256(repr((_surroundings(), [*arguments])).encode())
    for source in sources:
        key.update(hashlib.sha256(source.read_bytes()).digest())
    return STORE / f"{script.stem}-{key.hexdigest()[:32]}"


def sources_of(script: Path) -> list[Path] | None:
    """The script and what it imports from its folder and from the checkout; None where it imports our packages.

    A function that imports them is not for stock, which has no use for them.
    """
    found: set[Path] = set()
    waiting = [script.resolve()]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        tree = ast.parse(path.read_text())
        if any(name.split(".")[0] in _OURS for node in tree.body for name in _imported(node)):
            return None
        names = {name for node in ast.walk(tree) for name in _imported(node) if name.split(".")[0] not in _OURS}
        places = [base.joinpath(*name.split(".")) for name in names for base in (script.resolve().parent, ROOT)]
        waiting += [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return sorted(found)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@functools.cache
def _surroundings() -> tuple[Any, ...]:
    return sys.version, platform.machine(), sorted({f"{one.name} {one.version}" for one in importlib.metadata.distributions()})
