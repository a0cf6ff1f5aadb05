"""Runs generated scripts under stock Lightning and here, many in a process, compares, and shrinks what differs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from tests import compiling, warm
from tests.parity.harness import FLOAT32, ROOT, differences
from tests.stock_runs import kept_result

PLAYER = Path(__file__).with_name("play.py")
START_S = 120
EACH_S = 20
"""Of a process, and for each of its programs: one that takes more hangs."""
_OURS_ONLY = ("eager", "text", "traceback")


class Script(Protocol):
    """A generated script: a program of the Trainer, or a loop of Fabric."""

    @property
    def features(self) -> tuple[tuple[int, str], ...]: ...
    def without(self, number: int) -> Self: ...
    def source(self) -> str: ...


_Script = TypeVar("_Script", bound=Script)


@dataclass(frozen=True)
class Verdict:
    """How a program's runs compare.

    Attributes:
        kind: ``same``, ``eager`` (the same, not compiled), ``silent``, ``warned`` (different after a warning), ``crashed``,
            ``hung``, or ``void`` where stock itself could not run it.
        found: differences, or what was raised.
    """

    kind: str
    found: tuple[str, ...] = ()


def _run_chunk(programs: Mapping[str, Script], *, stock: bool, devices: int) -> dict[str, dict[str, Any]]:
    """Name → what the program wrote down; ``{"hung": …}`` or ``{"died": …}`` where the process did not end as it should."""
    found: dict[str, dict[str, Any]] = {}
    waiting = dict(programs)
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"fuzz_{name}.py" for name in programs}  # none hides a module of Python's
        for name, program in programs.items():
            paths[name].write_text(program.source())
        while waiting:
            problem = _run_process([paths[name] for name in waiting], Path(folder), stock=stock, devices=devices)
            before = len(waiting)
            for name in list(waiting):
                result = paths[name].with_suffix(".json")
                if result.exists():
                    found[name] = json.loads(result.read_text())
                    del waiting[name]
            if problem and waiting:
                found[name := next(iter(waiting))] = problem
                del waiting[name]
            elif len(waiting) == before and waiting:
                raise AssertionError(f"no result of {list(waiting)}")
    return found


def _run_process(paths: Sequence[Path], folder: Path, *, stock: bool, devices: int) -> dict[str, Any]:
    environment = {**compiling.environment(), "PYTHONPATH": str(ROOT)}
    command = [str(PLAYER), str(devices), str(folder), *map(str, paths)]
    command = command if stock else ["-m", "torch_compat", *command]
    limit = START_S + EACH_S * len(paths)
    try:
        done = warm.run(warm.STOCK if stock else warm.OURS, command, env=environment, timeout=limit, cwd=ROOT)
    except TimeoutError:
        return {"hung": f"after {limit} s"}
    return {"died": done.stderr[-3000:]} if done.returncode else {}


def judge(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Verdict:
    """Compare what a program wrote down under stock with what it wrote down here."""
    if "outside" in expected or "hung" in expected or "died" in expected:
        return Verdict("void", (str(expected),))
    if "hung" in found:
        return Verdict("hung")
    if "died" in found or "outside" in found:
        return Verdict("crashed", (str(found.get("died") or found.get("traceback")),))
    if "error" in found and "error" not in expected:
        return Verdict("crashed", (str(found["text"]),))
    theirs = {name: value for name, value in expected.items() if name not in _OURS_ONLY}
    ours = {name: value for name, value in found.items() if name not in _OURS_ONLY}
    if problems := tuple(differences(theirs, ours, FLOAT32)):
        return Verdict("warned" if found["eager"] else "silent", problems)
    return Verdict("eager", (found["eager"],)) if found["eager"] else Verdict("same")


def _run_stock(programs: Mapping[str, Script]) -> dict[str, dict[str, Any]]:
    sources = [f"{name}\n{program.source()}" for name, program in programs.items()]

    def ended(found: dict[str, dict[str, Any]]) -> bool:
        return not any("hung" in one or "died" in one for one in found.values())

    return kept_result(PLAYER, sources, lambda: _run_chunk(programs, stock=True, devices=1), is_kept=ended)


def verdicts(programs: Mapping[str, Script], devices: int = 1, at_once: int = 25) -> Iterator[tuple[str, Verdict]]:
    """Name, and how the program compares on so many devices; ``at_once`` share a process."""
    names = list(programs)
    for first in range(0, len(names), at_once):
        chunk = {name: programs[name] for name in names[first : first + at_once]}
        expected = _run_stock(chunk)
        found = _run_chunk(chunk, stock=False, devices=devices)
        for name in chunk:
            yield name, judge(expected[name], found[name])


def shrunk(program: _Script, kind: str, devices: int = 1) -> _Script:
    """The program without the features that its verdict does not need."""
    while True:
        fewer = {f"fewer_{number}": program.without(number) for number, _ in program.features}
        smaller = [fewer[name] for name, verdict in verdicts(fewer, devices) if verdict.kind == kind]
        if not smaller:
            return program
        program = smaller[0]
