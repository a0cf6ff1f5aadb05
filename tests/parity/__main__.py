"""``python -m tests.parity SCRIPT [CASE…]``: run cases under stock Lightning and ``torch_compat`` and print the differences."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.parity.harness import (
    EIGHT_DEVICES,
    FULLY_SHARDED,
    ONE_DEVICE,
    ONE_GPU,
    STOCK,
    TWO_PROCESSES,
    Backend,
    ScriptRuns,
    case_names,
    compare,
    script_names,
    tolerance_of,
)

BACKENDS = {"one": ONE_DEVICE, "eight": EIGHT_DEVICES, "fsdp": FULLY_SHARDED, "processes": TWO_PROCESSES, "gpu": ONE_GPU}


def report_case(runs: ScriptRuns, backend: Backend, case: str, limit: int) -> bool:
    """Print how a case compares; True when it is the same."""
    found = compare(runs.outcome(STOCK, case), runs.outcome(backend, case), tolerance_of(case))
    entries = runs.entries(backend, case)
    ran = {entry["executor"] if entry["fallback"] is None else f"eager: {entry['fallback']}" for entry in entries}
    print(f"{'same   ' if not found else 'DIFFERS'} {backend.name}: {case} ({', '.join(sorted(ran)) or 'nothing ran'})")
    for line in found[:limit]:
        print(f"        {line}")
    return not found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("script", choices=script_names())
    parser.add_argument("cases", nargs="*", help="default: all")
    parser.add_argument("--on", nargs="+", choices=list(BACKENDS), default=["one", "eight"])
    parser.add_argument("--lines", type=int, default=6, help="differences to print of each case")
    args = parser.parse_args()
    cases = args.cases or case_names(args.script)
    if unknown := sorted(set(cases) - set(case_names(args.script))):
        parser.error(f"{args.script} has no case {', '.join(unknown)}; it has {', '.join(case_names(args.script))}")
    with tempfile.TemporaryDirectory() as folder:
        runs = ScriptRuns(args.script, Path(folder), cases)
        same = [report_case(runs, BACKENDS[name], case, args.lines) for name in args.on for case in cases]
    print(f"{sum(same)} of {len(same)} the same")
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
