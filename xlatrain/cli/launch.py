"""``xlatrain launch``: a pod on one machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from xlatrain.launch import launch

HELP = "run a script as several processes of one world on this machine"


def main(arguments: Sequence[str]) -> int:
    """Run ``xlatrain launch …``; returns the exit status of the launch."""
    args = _parser().parse_args(arguments)
    program = ["-m", *args.module] if args.module else args.script
    if not program:
        print("xlatrain launch: say what to run: a script, or -m and a module", file=sys.stderr)
        return 2
    try:
        return launch(
            [sys.executable, *program],
            args.processes,
            args.devices_per_process,
            coordinator_port=args.coordinator_port,
            grace_s=args.grace_seconds,
            environment=None if args.plan is None else {**os.environ, "XLATRAIN_PLAN": os.path.abspath(args.plan)},
        )
    except ValueError as error:
        print(f"xlatrain launch: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xlatrain launch",
        description=HELP,
        usage="xlatrain launch --processes N [options] (script.py | -m module) [arguments …]",
    )
    parser.add_argument("--processes", "-n", type=int, required=True, metavar="N", help="number of processes")
    parser.add_argument("--devices-per-process", type=int, default=1, metavar="N", help="CPU devices of each (default: 1)")
    parser.add_argument("--coordinator-port", type=int, metavar="PORT", help="where process 0 listens (default: a free port)")
    parser.add_argument(
        "--grace-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="from asking a process to end until killing it (default: 10)",
    )
    parser.add_argument("--plan", metavar="FILE", help="plan.json of `xlatrain preflight`: the run says where it differs")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="the module to run, as for python, with its arguments"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script to run, with its arguments")
    return parser
