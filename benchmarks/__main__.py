"""``python -m benchmarks``: measure, print one table, keep the result in ``benchmarks/results/``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import hardware
from benchmarks.convolutions import convolutions
from benchmarks.gpu import gpu
from benchmarks.measurements import Row, depth, host_cost, purity, single_ops, step_times
from benchmarks.models import MODELS, models, worst_first
from benchmarks.result import Result, worsened

RESULTS = Path(__file__).parent / "results"


def line_of(row: Row) -> str:
    met = {True: "met", False: "missed", None: ""}[row.met]
    return f"{row.what:<36} {row.value:>10}  {row.target:<10} {met:<7} {row.detail}"


def run(parts: dict[str, Callable[[], Iterator[Row]]], result: Result) -> None:
    """Measure all rows; each is printed and kept as soon as it is known, until the run is interrupted (Ctrl-C)."""
    with contextlib.suppress(KeyboardInterrupt):
        for part in parts.values():
            for row in part():
                print(line_of(row), flush=True)
                result.add(row)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="of steps, host, purity, depth, ops, convolutions, models, gpu; default: all but the last three",
    )
    parser.add_argument("--steps", type=int, default=30, help="measured steps of the GPT and the CNN")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL", help="of the part models")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="of the part models: add the models that this result file lacks",
    )
    parser.add_argument("--check", type=Path, metavar="FILE", help="fail where a ratio is a tenth worse than in this result file")
    args = parser.parse_args()
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "steps": lambda: step_times(args.steps),
        "host": lambda: host_cost(500),
        "purity": lambda: purity(500),
        "depth": depth,
        "ops": single_ops,
    }
    chosen = args.parts or list(parts)
    parts["convolutions"] = convolutions
    parts["models"] = lambda: models(args.steps, result.without(args.models))
    parts["gpu"] = lambda: gpu(args.steps)
    if unknown := set(args.parts) - set(parts):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    if args.resume and chosen != ["models"]:
        parser.error("--resume goes with the part models alone")
    machine = {**hardware.describe(), "load_before": hardware.load()}
    print(", ".join(f"{name} {value}" for name, value in machine.items()), end="\n\n")
    try:
        before = Result.of_file(args.check, machine).rows if args.check else []
        result = Result.of_file(args.resume, machine) if args.resume else Result.new(RESULTS, machine)
        run({name: part for name, part in parts.items() if name in chosen}, result)
    except RuntimeError as error:
        sys.exit(str(error))
    if chosen == ["models"]:
        print("\nworst first:", *map(line_of, worst_first(result.rows)), sep="\n")
    print(f"\nkept in {os.path.relpath(result.path)}")
    if worse := worsened(before, result.rows):
        sys.exit("\n".join([f"worse than in {args.check}:", *worse]))


if __name__ == "__main__":
    main()
