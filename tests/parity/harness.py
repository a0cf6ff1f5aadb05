"""Runs one script under stock Lightning and under ``torch_compat``, in a process each, and compares what they wrote down."""

from __future__ import annotations

import ast
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests import compiling, stock_runs, warm

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PROCESS_LIMIT_S = 900


@dataclass(frozen=True)
class Backend:
    """How a script is run."""

    name: str
    prefix: tuple[str, ...]
    devices: int
    strategy: str = "auto"
    nodes: int = 1
    accelerator: str = "cpu"

    @property
    def is_stock(self) -> bool:
        return not self.prefix and self.strategy == "auto"


ABOUT_NUMBERS = ("basics", "manual", "models", "precision", "raw_loops")
"""Scripts that are compiled as for users on one device; the others are about what Python does beside the program."""

STOCK = Backend("stock", (), 1)
ONE_DEVICE = Backend("one device", ("-m", "torch_compat"), 1)
EIGHT_DEVICES = Backend("eight devices", ("-m", "torch_compat"), 8)
TWO_PROCESSES = Backend("two processes", ("-m", "torch_compat"), devices=4, nodes=2)
STOCK_ON_ONE_DEVICE = Backend("the Trainer of stock on one device", (), 1, "xlatrain.lightning")
STOCK_ON_FOUR_DEVICES = Backend("the Trainer of stock on four devices", (), 4, "xlatrain.lightning")
ONE_GPU = Backend("one GPU", ("-m", "torch_compat"), 1, accelerator="gpu")
FULLY_SHARDED = Backend("fully sharded", ("-m", "torch_compat"), 8, "fsdp")


@dataclass(frozen=True)
class Tolerance:
    """How far two floating-point numbers may lie apart: ``relative * |expected| + absolute``."""

    relative: float = 2e-4
    absolute: float = 2e-5

    def allows(self, expected: float, found: float) -> bool:
        if not (math.isfinite(expected) and math.isfinite(found)):
            return repr(float(expected)) == repr(float(found))
        return abs(expected - found) <= self.relative * abs(expected) + self.absolute


FLOAT32 = Tolerance()
_TOLERANCES = {
    # bfloat16 has 8 bits of mantissa, and the backends round at other places.
    "bf16_mixed": Tolerance(relative=3e-2, absolute=1e-2),
    "bf16_true": Tolerance(relative=5e-2, absolute=2e-2),
    "gradients_of_bf16_mixed": Tolerance(relative=3e-2, absolute=1e-2),
    "autocast_of_the_user": Tolerance(relative=3e-2, absolute=1e-2),
    "autocast_left_by_the_user": Tolerance(relative=3e-2, absolute=1e-2),  # validation is not cast, its weights were
    "two_calls_in_bfloat16": Tolerance(relative=3e-2, absolute=1e-1),  # values are sums, up to 40
    "fp16_mixed": Tolerance(relative=3e-2, absolute=1e-2),  # on CPU that is bf16-mixed, here and in stock
    "fp16_true": Tolerance(relative=1e-2, absolute=4e-3),
    "scaled_with_hooks": Tolerance(relative=3e-2, absolute=4e-3),
    "scaled_by_hand": Tolerance(relative=3e-2, absolute=4e-3),
    # float64 throughout: a value that was float32 in between would show.
    "double": Tolerance(relative=1e-9, absolute=1e-10),
    "double_clipped": Tolerance(relative=1e-12, absolute=1e-13),
    "double_values_of_metrics": Tolerance(relative=1e-12, absolute=1e-13),
    "double_with_numbers": Tolerance(relative=1e-9, absolute=1e-10),
}


def tolerance_of(case: str) -> Tolerance:
    """The tolerance that a case is compared with."""
    return _TOLERANCES.get(case, FLOAT32)


@dataclass(frozen=True)
class Outcome:
    """The record that a case wrote down."""

    record: dict[str, Any]
    weights: dict[str, np.ndarray]


@functools.cache
def case_names(script: str) -> list[str]:
    """The functions with ``@case`` in the script and its parts, found without importing them (they import stock Lightning)."""
    bodies = [ast.parse(path.read_text()).body for path in (SCRIPTS / f"{script}.py", *sorted(SCRIPTS.glob(f"{script}_*.py")))]
    functions = [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if any(ast.unparse(decorator) == "case" for decorator in node.decorator_list)]


def script_names() -> list[str]:
    """The scripts that have cases; ``a_b.py`` beside ``a.py`` is a part of the script ``a``, which imports it."""
    stems = {path.stem for path in SCRIPTS.glob("*.py")}
    parts = {stem for stem in stems if any(stem.startswith(f"{other}_") for other in stems)}
    return sorted(stem for stem in stems - parts if case_names(stem))


class ScriptRuns:
    """The runs of one script, each backend once; later questions are answered from the files."""

    def __init__(self, script: str, folder: Path, cases: list[str] | None = None) -> None:
        self.script = script
        self.folder = folder
        self.cases = cases or case_names(script)
        self._finished: set[Backend] = set()

    def of(self, cases: list[str]) -> ScriptRuns:
        """Runs of a part of the cases, compared with the run of all of them under stock."""
        self.run(STOCK)
        part = ScriptRuns(self.script, self.folder, cases)
        part._finished.add(STOCK)
        return part

    def outcome(self, backend: Backend, case: str) -> Outcome:
        """The record that the case wrote down under the backend."""
        self.run(backend)
        where = self._folder(backend) / case
        with np.load(where / "weights.npz") as weights:
            return Outcome(json.loads((where / "record.json").read_text()), dict(weights))

    def report(self, backend: Backend) -> dict[str, Any]:
        """The run report that ``torch_compat`` wrote for the whole script."""
        self.run(backend)
        return json.loads(self._report(backend).read_text())

    def entries(self, backend: Backend, case: str) -> list[dict[str, Any]]:
        """The entries of the run report about the case alone."""
        self.run(backend)
        position = self.cases.index(case)
        before = self._entries_up_to(backend, self.cases[position - 1]) if position else []
        return self._entries_up_to(backend, case)[len(before) :]

    def _entries_up_to(self, backend: Backend, case: str) -> list[dict[str, Any]]:
        return json.loads((self._folder(backend) / case / "runs.json").read_text())

    def run(self, backend: Backend) -> None:
        """Run all cases under the backend unless that has been done.

        Raises:
            AssertionError: the process failed as a whole (a case that fails is part of its record); the text has its output.
        """
        if backend in self._finished:
            return
        if not backend.is_stock:
            self.run(STOCK)  # first, since it writes the initial weights
        arguments = ["--cases", *self.cases]
        arguments += ["--devices", str(backend.devices), "--nodes", str(backend.nodes), "--strategy", backend.strategy]
        arguments += ["--accelerator", backend.accelerator]
        if backend.is_stock:
            stock_runs.fill(self.folder, SCRIPTS / f"{self.script}.py", arguments, lambda _: self._run(backend, arguments))
        else:
            self._run(backend, arguments)
        self._finished.add(backend)

    def _run(self, backend: Backend, arguments: list[str]) -> bool:
        command = [*backend.prefix, str(SCRIPTS / f"{self.script}.py"), *arguments]
        command += ["--out", str(self._folder(backend)), "--initial", str(self.folder / "initial")]
        environment = self._environment(backend)
        if backend.nodes > 1:
            pod = (backend.nodes, backend.devices)
            done = warm.run_pod(command, *pod, env=environment, timeout=PROCESS_LIMIT_S, cwd=ROOT)
        else:
            preloaded = warm.OURS if backend.prefix else warm.STOCK if backend.is_stock else warm.BOTH
            done = warm.run(preloaded, command, env=environment, timeout=PROCESS_LIMIT_S, cwd=ROOT)
        assert done.returncode == 0, f"{self.script} under {backend.name}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return True

    def _environment(self, backend: Backend) -> dict[str, str]:
        environment = compiling.environment(quickly=backend != ONE_DEVICE or self.script not in ABOUT_NUMBERS)
        if backend.accelerator == "gpu":
            environment = {**compiling.environment(quickly=False), "JAX_PLATFORMS": "cuda,cpu"}
        environment.update(PYTHONPATH=str(SCRIPTS), PYTHONWARNINGS="ignore", XLATRAIN_REPORT=str(self._report(backend)))
        return environment

    def _folder(self, backend: Backend) -> Path:
        return self.folder / backend.name.replace(" ", "_")

    def _report(self, backend: Backend) -> Path:
        return self._folder(backend).with_suffix(".report.json")


def differences(expected: Any, found: Any, tolerance: Tolerance, path: str = "") -> Iterator[str]:
    """Each place where two JSON values differ: floats beyond the tolerance, anything else at all."""
    if isinstance(expected, float) and isinstance(found, int | float) and not isinstance(found, bool):
        if not tolerance.allows(expected, found):
            yield f"{path}: expected {expected!r}, found {found!r}"
    elif isinstance(expected, dict) and isinstance(found, dict):
        for key in expected.keys() | found.keys():
            if key not in found or key not in expected:
                problem = "missing" if key in expected else "not expected"
                yield f"{path}[{key!r}]: {problem}: {expected.get(key, found.get(key))!r}"
            else:
                yield from differences(expected[key], found[key], tolerance, f"{path}[{key!r}]")
    elif isinstance(expected, list) and isinstance(found, list):
        yield from _list_differences(expected, found, tolerance, path)
    elif expected != found or isinstance(expected, bool) != isinstance(found, bool):
        yield f"{path}: expected {expected!r}, found {found!r}"


def _list_differences(expected: list, found: list, tolerance: Tolerance, path: str) -> Iterator[str]:
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        here = list(differences(one, other, tolerance, f"{path}[{index}]"))
        yield from here
        if here and len(expected) != len(found):
            break  # shifted from here on: what follows says nothing
    if len(expected) != len(found):
        yield f"{path}: expected {len(expected)} entries, found {len(found)}"


def weight_differences(expected: dict[str, np.ndarray], found: dict[str, np.ndarray], tolerance: Tolerance) -> Iterator[str]:
    """Names that only one side has, and the largest deviation of every weight that is beyond the tolerance."""
    for name in sorted(expected.keys() ^ found.keys()):
        yield f"weights: {name} is {'missing' if name in expected else 'not expected'}"
    for name in sorted(expected.keys() & found.keys()):
        excess = np.abs(expected[name] - found[name]) - tolerance.relative * np.abs(expected[name]) - tolerance.absolute
        if excess.size and excess.max() > 0:
            worst = np.unravel_index(excess.argmax(), excess.shape)
            yield f"weights: {name}{list(map(int, worst))}: expected {expected[name][worst]}, found {found[name][worst]}"


def compare(expected: Outcome, found: Outcome, tolerance: Tolerance) -> list[str]:
    """All differences between two outcomes; of errors the type is compared, the texts may differ."""
    ours, theirs = dict(found.record), dict(expected.record)
    trace = ours.pop("traceback", "")
    theirs.pop("traceback", None)
    if "error" in ours and "error" not in theirs:
        return [f"failed with {trace}"]
    return [*differences(theirs, ours, tolerance), *weight_differences(expected.weights, found.weights, tolerance)]
