"""``python -m benchmarks``: measure, print one table, keep the result in ``benchmarks/results/``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import hardware
from benchmarks.convolutions import convolutions
from benchmarks.gpu import gpu
from benchmarks.measurements import Row, depth, host_cost, purity, single_ops, step_times
from benchmarks.models import MODELS, models

RESULTS = Path(__file__).parent / "results"


def line_of(row: Row) -> str:
    met = {True: "met", False: "missed", None: ""}[row.met]
    return f"{row.what:<36} {row.value:>10}  {row.target:<10} {met:<7} {row.detail}"


def run(parts: dict[str, Callable[[], Iterator[Row]]]) -> list[Row]:
    """All rows, each printed as soon as it is known; where the run is interrupted (Ctrl-C), those that are."""
    rows = []
    with contextlib.suppress(KeyboardInterrupt):
        for part in parts.values():
            for row in part():
                print(line_of(row), flush=True)
                rows.append(row)
    return rows


def keep(rows: list[Row], machine: dict[str, str]) -> Path:
    """Write a dated result file."""
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d_%H%M")
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{today}.json"
    target.write_text(json.dumps({"date": today, "machine": machine, "rows": [row.as_json() for row in rows]}, indent=2) + "\n")
    return target


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
    parts["models"] = lambda: models(args.steps, args.models)
    parts["gpu"] = lambda: gpu(args.steps)
    if unknown := set(args.parts) - set(parts):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    machine = {**hardware.describe(), "load_before": hardware.load()}
    print(", ".join(f"{name} {value}" for name, value in machine.items()), end="\n\n")
    try:
        rows = run({name: part for name, part in parts.items() if name in chosen})
    except RuntimeError as error:
        sys.exit(str(error))
    print(f"\nkept in {keep(rows, machine).relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
