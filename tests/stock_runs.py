"""What scripts came to under stock Lightning, kept in ``.cache/stock`` by all that decides about it.

That is the script with its arguments, what it imports from its folder and from the checkout, the releases of Python and of the
packages of ``constraints.txt``, and what torch's kernels, and so its rounding, are chosen by: vendor, instructions and number of
the processors. ``tests/stock_outcomes`` has what is kept for all clones: ``make stock-outcomes`` puts there
what the test runs of the last hours asked for, and takes away what no script is any more. With ``STOCK_AGAIN`` in the
environment neither is read: everything runs again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / ".cache" / "stock"
OUTCOMES = ROOT / "tests" / "stock_outcomes"
_OURS = ("torch_compat", "xlatrain")
_DAYS = 30
"""What nobody has used for so long is removed."""
_HOURS = 6
"""What was used within so many is kept for all clones."""
_ASKED = "asked.json"
"""In an entry of the store: the script and the arguments. Beside it is what the run left."""


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
    name = _name(script, arguments)
    if name is None:
        run(folder)
        return
    kept = STORE / name
    if "STOCK_AGAIN" not in os.environ:
        if not kept.is_dir() and (shipped := OUTCOMES / f"{name}.tar.xz").is_file():
            with tarfile.open(shipped) as archive:
                _put(name, lambda whole: archive.extractall(whole, filter="data"))
        if kept.is_dir():
            shutil.copytree(kept / "left", folder, dirs_exist_ok=True, symlinks=True)
            os.utime(kept)
            return
    if not run(folder):
        return

    def write(whole: Path) -> None:
        shutil.copytree(folder, whole / "left", symlinks=True)
        asked = {"script": os.path.relpath(script.resolve(), ROOT), "arguments": [*arguments]}
        (whole / _ASKED).write_text(json.dumps(asked))

    _put(name, write)


def _put(name: str, write: Callable[[Path], None]) -> None:
    """Put an entry into the store, or leave the one that is there."""
    STORE.mkdir(parents=True, exist_ok=True)
    for old in STORE.iterdir():
        with suppress(FileNotFoundError):  # another process removes it, too
            if time.time() - old.stat().st_mtime > _DAYS * 86400:
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=STORE) as beside:
        whole = Path(beside) / "whole"
        whole.mkdir()
        write(whole)
        os.utime(whole)  # an archive has no times
        with suppress(OSError):  # another process has put it there
            whole.rename(STORE / name)


def ship() -> None:
    """Bring :data:`OUTCOMES` up to date with the store, and tell what changed."""
    OUTCOMES.mkdir(exist_ok=True)
    for shipped in sorted(OUTCOMES.glob("*.tar.xz")):
        with tarfile.open(shipped) as archive:
            asked = archive.extractfile(_ASKED)
            if asked is None or not _is_current(shipped.name.removesuffix(".tar.xz"), asked.read()):
                shipped.unlink()
                print(f"- {shipped.name}")
    for kept in sorted(STORE.iterdir()):
        target = OUTCOMES / f"{kept.name}.tar.xz"
        used = kept.joinpath(_ASKED).is_file() and time.time() - kept.stat().st_mtime < _HOURS * 3600
        if used and not target.exists() and _is_current(kept.name, (kept / _ASKED).read_bytes()):
            with tarfile.open(target, "w:xz") as archive:
                archive.add(kept, arcname=".", filter=_without_owner)
            print(f"+ {target.name}")


def _is_current(name: str, asked: bytes) -> bool:
    found = json.loads(asked)
    script = ROOT / found["script"]
    return script.is_file() and ROOT in script.resolve().parents and _name(script, found["arguments"]) == name


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what would make another file of the same contents."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime, member.mode = 0, 0o755 if member.isdir() else 0o644
    member.name = member.name.removeprefix("./") or "."
    return member


def _name(script: Path, arguments: Sequence[str]) -> str | None:
    """The name of an entry; None where nothing can be kept."""
    sources = sources_of(script)
    if sources is None:
        return None
    key = hashlib.sha256(repr((_surroundings(), [*arguments])).encode())
    for source in sources:
        key.update(hashlib.sha256(source.read_bytes()).digest())
    return f"{script.stem}-{key.hexdigest()[:32]}"


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
    named = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    releases: dict[str, str] = {}
    for one in importlib.metadata.distributions():
        releases.setdefault(_normal(one.name), one.version)  # the first is imported; setuptools adds its own copies as the last
    return platform.python_version(), _processors(), sorted((one, releases.get(_normal(one))) for one in named)


def _processors() -> tuple[Any, ...]:
    import torch

    listed = Path("/proc/cpuinfo")
    vendors = set(re.findall(r"^vendor_id\s*:\s*(\S+)", listed.read_text(), re.MULTILINE)) if listed.is_file() else set()
    return platform.machine(), sorted(vendors), torch.backends.cpu.get_cpu_capability(), os.cpu_count()


def _normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


if __name__ == "__main__":
    ship()
