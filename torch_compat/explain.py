"""``xlatrain explain``: a script's first steps, and for each of its runs how they ran, why, and what to change."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PAGE = "docs/why_eager.md"


@dataclass(frozen=True)
class Explanation:
    """How the steps of one run ran.

    Attributes:
        stage: ``fit``, ``validate``, ``test``, ``predict`` or ``fabric``.
        executor: ``compiled``, ``eager``, or ``none`` where the run ended before a step was compiled.
        mesh: sizes of the mesh's axes.
        programs: how many were compiled.
        recompilations: what changed for each program after a step's first.
        where: file and line of the user's that cannot be compiled; empty if the reason has none.
        reason: why steps are eager; empty if they are not.
        fix: what to change.
        on_host: methods of evaluation that run on the host beside compiled training, each with where, reason and fix.
    """

    stage: str
    executor: str
    mesh: dict[str, int]
    programs: int
    recompilations: list[str]
    where: str
    reason: str
    fix: str
    on_host: list[str]

    @classmethod
    def of(cls, run: dict[str, Any]) -> Explanation:
        """The explanation of an entry of the run report."""
        where, reason, fix = _parts(run["fallback"] or "")
        on_host = [f"{name}: EAGER on the host\n{_told(*_parts(text))}" for name, text in run["on_host"].items()]
        return cls(
            run["stage"], run["executor"], run["mesh"], run["variants"], run["recompilations"], where, reason, fix, on_host
        )

    def __str__(self) -> str:
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one device"
        if self.executor != "eager":
            lines = [f"{self.stage}: {self.executor} · {mesh} · {self.programs} program{'s' * (self.programs != 1)}"]
            return "\n".join([*lines, *(f"  compiled again: {text}" for text in self.recompilations), *self.on_host])
        return "\n".join([f"{self.stage}: EAGER on the host", _told(self.where, self.reason, self.fix)])


def explain(script: Sequence[str], batches: int = 4) -> tuple[list[Explanation], str | None]:
    """Run a script, or a module after ``-m``, with a few batches in each run of a Trainer.

    Each Trainer is made with ``fast_dev_run=batches``: one epoch, no loggers and no checkpoints. Loops of Fabric run as they are.

    Args:
        script: the script's path (or ``-m`` and a module's name) and its arguments.
        batches: of each loop.

    Returns:
        an explanation for each run, and the traceback of the error that ended the script, if one did.

    Raises:
        ValueError: ``batches`` is no positive number.
    """
    if batches < 1:
        raise ValueError(f"batches={batches}; expected at least 1, since a run without steps has nothing to explain")
    from torch_compat.__main__ import run_module, run_script
    from torch_compat.install import installed
    from torch_compat.preflight.script import main_kept

    error: str | None = None
    with _report() as runs:
        with installed(), main_kept(), _short_runs(batches):
            try:
                if script[0] == "-m":
                    run_module(script[1], list(script[2:]))
                else:
                    run_script(script[0], list(script[1:]))
            except SystemExit as end:
                error = None if end.code in (None, 0) else f"the script exited with {end.code}"
            except Exception:
                error = traceback.format_exc()
        return [Explanation.of(run) for run in runs()], error


@contextlib.contextmanager
def _report() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """The run report in a file of its own, beside the one that the user may have asked for."""
    before = os.environ.get("XLATRAIN_REPORT")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        os.environ["XLATRAIN_REPORT"] = str(path)
        try:
            yield lambda: json.loads(path.read_text())["runs"] if path.exists() else []
        finally:
            os.environ.pop("XLATRAIN_REPORT")
            if before is not None:
                os.environ["XLATRAIN_REPORT"] = before


@contextlib.contextmanager
def _short_runs(batches: int) -> Iterator[None]:
    """Trainers that are made inside run a few batches of one epoch, without loggers and checkpoints."""
    from torch_compat.trainer.trainer import Trainer
    from xlatrain.bridge.patches import patched

    make = Trainer.__init__

    def short(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        make(trainer, *args, **{**kwargs, "fast_dev_run": batches})

    with patched([(Trainer, "__init__", short)]):
        yield


def _told(where: str, reason: str, fix: str) -> str:
    told = [("where", where), ("reason", reason), ("fix", fix)]
    return "\n".join(f"  {name + ':':7} {text}" for name, text in told if text)


def _parts(fallback: str) -> tuple[str, str, str]:
    """Where, why and what to change, of the text of a fallback."""
    text, _, fix = fallback.partition("Fix:")
    first, _, rest = text.strip().partition("\n")
    if rest.strip().startswith("cannot be captured"):
        reason = rest.strip().removeprefix("cannot be captured:")
    else:
        place = re.match(r"(\S+\.py:\d+): ", first)
        first, reason = (place[1], text.strip()[place.end() :]) if place else ("", text)
    return " ".join(first.split()), " ".join(reason.split()).rstrip("."), " ".join(fix.split()).rstrip(".")


class _Command:
    HELP = "run a script's first steps and say for each run whether they were compiled, why not, and what to change"

    def main(self, arguments: Sequence[str]) -> int:
        """Run ``xlatrain explain …``; returns 0 if all runs were compiled, 1 if not, 2 if that cannot be said."""
        args = _parser(self.HELP).parse_args(arguments)
        script = ["-m", *args.module] if args.module else args.script
        if not script:
            print("xlatrain explain: which script? Example: xlatrain explain train.py", file=sys.stderr)
            return 2
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what the script prints is not the explanation
                found, error = explain(script, args.batches)
        except (ValueError, OSError) as problem:
            print(f"xlatrain explain: {problem}", file=sys.stderr)
            return 2
        if args.json:
            print(json.dumps({"runs": [asdict(one) for one in found], "error": error}, indent=1))
        else:
            print("\n".join(map(str, found)))
            if any(one.executor == "eager" or one.on_host for one in found):
                print(f"More about reasons and fixes: {_PAGE}")
        if error is not None:
            print(f"xlatrain explain: the script ended early.\n{error}", file=sys.stderr)
        if not found:
            print("xlatrain explain: the script ran no step, so there is nothing to explain", file=sys.stderr)
        if error is not None or not found or any(one.executor == "none" for one in found):
            return 2
        return int(any(one.executor == "eager" or one.on_host for one in found))


COMMAND = _Command()


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xlatrain explain",
        description=f"{description}. Trainers run with fast_dev_run: a few batches, no loggers, no checkpoints.",
    )
    parser.add_argument("--batches", type=int, default=4, metavar="N", help="of each loop (default: 4)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="the module to run, as for python")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script to run, with its arguments")
    return parser
