"""``python -m tests.fuzz [--count N] [--first SEED] [--states | --loops | …] [--shrink]``: what differs from stock.

With ``--tally FILE`` the verdicts are written there piece by piece, and a run that was cut goes on after the last one.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path

from tests.fuzz.expressions import Expressions
from tests.fuzz.features import FEATURES
from tests.fuzz.harness import Script, shrunk, verdicts
from tests.fuzz.hooks import Hooked
from tests.fuzz.loops import Loop
from tests.fuzz.objects import Objects, each
from tests.fuzz.programs import WRITTEN, Program, probe
from tests.fuzz.states import STATES

_BAD = ("silent", "warned", "crashed", "hung")


def probes() -> dict[str, Program]:
    """A program for each kind of host state and step that reads it."""
    found = {}
    for index, state in enumerate(STATES):
        for offset, where in enumerate(("training", "validation")):
            written = WRITTEN[(index + offset) % len(WRITTEN)]
            found[f"{state.name}_{where}"] = probe(state, where, written)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--states", action="store_true", help="one program for each kind of host state instead of random ones")
    parser.add_argument("--loops", action="store_true", help="random loops of Fabric instead of programs of the Trainer")
    parser.add_argument("--hooks", action="store_true", help="random programs of hooks and what they change")
    parser.add_argument("--expressions", action="store_true", help="random expressions of values of a step")
    parser.add_argument("--objects", action="store_true", help="random uses of objects that are written in C")
    parser.add_argument("--kinds", action="store_true", help="one program for each kind of these objects and each use of it")
    parser.add_argument("--tally", type=Path, help="a file of verdicts: those that are in there are not found again")
    parser.add_argument("--features", action="store_true", help="one program for each other feature")
    parser.add_argument("--only", default="", help="of these, those whose name holds this")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--source", action="store_true", help="print what would be run")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.count)
    kind = Loop if asked.loops else Hooked if asked.hooks else Expressions if asked.expressions else Program
    kind = Objects if asked.objects else kind
    programs: dict[str, Script] = {f"seed_{seed}": kind.random(seed) for seed in seeds}
    if asked.states:
        programs = dict(probes())
    if asked.features:
        programs = {name: Program(((0, name),)) for name in FEATURES}
    if asked.kinds:
        programs = dict(each())
    programs = {name: program for name, program in programs.items() if asked.only in name}
    if asked.source:
        print(*(program.source() for program in programs.values()), sep="\n")
        return
    tally: dict[str, str] = json.loads(asked.tally.read_text()) if asked.tally and asked.tally.exists() else {}
    for name, verdict in verdicts({name: one for name, one in programs.items() if name not in tally}, asked.devices):
        tally[name] = verdict.kind
        if asked.tally:
            asked.tally.write_text(json.dumps(tally))
        if verdict.kind in (*_BAD, "void") or ((asked.states or asked.features) and verdict.kind == "eager"):
            program = programs[name]
            if asked.shrink and verdict.kind in _BAD:
                program = shrunk(program, verdict.kind, asked.devices)
            print(f"{verdict.kind}: {name}: {[feature for _, feature in program.features]}")
            print("   ", *(one.strip()[-300:].replace("\n", "\n    ") for one in verdict.found[:2]), sep="\n    ", flush=True)
    print(dict(collections.Counter(tally.values())))


if __name__ == "__main__":
    main()
