"""``xlatrain preflight``: compile a script's training step for a pod, on a machine that has none."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points

HELP = "compile a script's training step for a pod that is not here: does it fit, and what will it do there"
GROUP = "xlatrain.preflight"
"""Entry points of this group run scripts up to their ``fit``.

They are called ``(topology, script, *, as_json, output, store, suggest, evaluation, search_s)`` and give the exit status.
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``xlatrain preflight …``; returns 0 if it fits, 1 if not, 2 if that cannot be said, 124 after the time limit."""
    args = _parser().parse_args(arguments)
    script = ["-m", *args.module] if args.module else args.script
    if not script or script == ["-m"]:
        print("xlatrain preflight: which script? Example: xlatrain preflight --topology v5e:4x4 train.py", file=sys.stderr)
        return 2
    if args.store and not args.output:
        print("xlatrain preflight: --store keeps programs in the folder of --output DIR, which is not given", file=sys.stderr)
        return 2
    from xlatrain.preflight import Topology, TopologyError, libtpu

    libtpu.prepare()
    try:
        topology = Topology.parse(args.topology, args.num_slices)
        if topology.chip is not None:
            libtpu.check()
    except (TopologyError, libtpu.LibtpuError) as error:
        print(f"xlatrain preflight: {error}", file=sys.stderr)
        return 2
    runner = next(iter(entry_points(group=GROUP)), None)
    if runner is None:
        print("xlatrain preflight: no installed package runs scripts for it", file=sys.stderr)
        return 2
    options = {"output": args.output, "suggest": not args.no_suggestions, "evaluation": not args.no_validation}
    options |= {"search_s": args.search, "store": args.store}
    with _time_limit(args.timeout):
        return runner.load()(topology, script, as_json=args.json, **options)


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """End the process after so many seconds, wherever it is: the compiler does not listen to signals."""
    if seconds is None:
        yield
        return
    stderr = os.dup(2)  # the compiler's own is put aside while it works

    def end() -> None:
        os.write(stderr, f"xlatrain preflight: stopped after the time limit of {seconds:g} s (--timeout)\n".encode())
        os._exit(124)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        os.close(stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xlatrain preflight",
        description=f"{HELP}. The script runs up to its trainer.fit. The exit status is 0 if it fits, 1 if not, "
        "2 if that cannot be said.",
    )
    parser.add_argument("--topology", required=True, metavar="NAME", help="v5e:16x16, v5p:4x4x4, v6e:8x8, … or cpu:8")
    parser.add_argument("--num-slices", type=int, default=1, metavar="N", help="slices of that topology (default: 1)")
    parser.add_argument("--output", metavar="DIR", help="write preflight.json, preflight.html and plan.json there")
    parser.add_argument("--store", action="store_true", help="also keep each program's StableHLO in the --output folder")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after so many seconds")
    parser.add_argument("--no-suggestions", action="store_true", help="where it does not fit, do not look for what would")
    parser.add_argument(
        "--search", type=float, metavar="S", help="also compile other meshes and batches for so many seconds, and rank them"
    )
    parser.add_argument("--no-validation", action="store_true", help="leave out the validation step")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="the module to run, as for python, with its arguments"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script to run, with its arguments")
    return parser
