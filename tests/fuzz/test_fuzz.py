"""Each kind of host state, each other feature, and random scripts, under stock Lightning and here: none differs silently."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz import known
from tests.fuzz.expressions import Expressions
from tests.fuzz.features import FEATURES
from tests.fuzz.harness import Verdict, verdicts
from tests.fuzz.hooks import Hooked
from tests.fuzz.loops import Loop
from tests.fuzz.objects import Objects
from tests.fuzz.programs import WRITTEN, Program, probe
from tests.fuzz.states import STATES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

GOOD = ("same", "eager")
PROBES = {state.name: probe(state, "training", WRITTEN[index % len(WRITTEN)]) for index, state in enumerate(STATES)}
ALONE = {name: Program(((0, name),)) for name in FEATURES}
SEEDS = {seed: Program.random(seed) for seed in range(20)}
ON_FOUR = range(1000, 1008)
TOGETHER = 4
"""Kinds of host state in a program. Each is changed at a moment of its own (:data:`WRITTEN` has more of them)."""


def _params(names: Any, reasons: Any) -> list[Any]:
    def marks(name: Any) -> list[Any]:
        return [pytest.mark.xfail(reason=reasons[name], strict=True)] if name in reasons else []

    return [pytest.param(name, marks=marks(name)) for name in names]


@pytest.fixture(scope="module")
def states() -> dict[str, Verdict]:
    """Kind of host state → how a program that has it compares: with others, or alone where those do not compile to the same."""
    names = list(PROBES)
    shared = [tuple(names[first : first + TOGETHER]) for first in range(0, len(names), TOGETHER)]
    programs = {"_".join(group): Program.joined(PROBES[name] for name in group) for group in shared}
    same = {group for group, (_, verdict) in zip(shared, verdicts(programs), strict=True) if verdict.kind == "same"}
    alone = {name: PROBES[name] for group in shared if group not in same for name in group}
    return {name: Verdict("same") for group in same for name in group} | dict(verdicts(alone))


@pytest.fixture(scope="module")
def features() -> dict[str, Verdict]:
    """Feature → how the program that has it alone compares."""
    return dict(verdicts(ALONE, at_once=50))


@pytest.fixture(scope="module")
def seeds() -> dict[str, Verdict]:
    """Seed → how its program compares."""
    return dict(verdicts({str(seed): program for seed, program in SEEDS.items()}))


@pytest.mark.parametrize("name", _params(PROBES, known.STATES))
def test_host_state(name: str, states: dict[str, Verdict]) -> None:
    assert states[name].kind in GOOD, "\n".join(states[name].found[:8])


@pytest.mark.parametrize("name", _params(ALONE, known.FEATURES))
def test_feature(name: str, features: dict[str, Verdict]) -> None:
    assert features[name].kind in GOOD, "\n".join(features[name].found[:8])


@pytest.mark.parametrize("seed", _params(SEEDS, known.SEEDS))
def test_random_program(seed: int, seeds: dict[str, Verdict]) -> None:
    verdict = seeds[str(seed)]
    assert verdict.kind in GOOD, f"{SEEDS[seed].features}\n" + "\n".join(verdict.found[:8])


@pytest.mark.parametrize("devices", [1, 2])
def test_random_loops_of_fabric(devices: int) -> None:
    """Compiled: what could not be is another thing than what the loops do."""
    loops = {str(seed): Loop.random(seed) for seed in range(10 * devices, 10 * devices + 6)}
    bad = {name: (loops[name], verdict) for name, verdict in verdicts(loops, devices) if verdict.kind != "same"}
    assert not bad


def test_random_programs_of_hooks() -> None:
    """What hooks and steps change is what the steps that follow read; only eager steps follow some of these containers."""
    found = dict(verdicts({str(seed): Hooked.random(seed) for seed in range(10, 20)}))
    assert not {name: verdict for name, verdict in found.items() if verdict.kind not in GOOD}
    assert sum(verdict.kind == "same" for verdict in found.values()) >= 6


def test_random_expressions() -> None:
    """What is computed of the values of a step has stock's value and class wherever it is logged, kept, said or returned."""
    found = dict(verdicts({str(seed): Expressions.random(seed) for seed in range(210, 222)}))
    assert not {name: verdict for name, verdict in found.items() if verdict.kind not in (*GOOD, "void")}


def test_random_uses_of_objects_in_c() -> None:
    """What steps and hooks change of them has been done as often as in stock; most steps that do are eager before."""
    found = dict(verdicts({str(seed): Objects.random(seed) for seed in range(12)}))
    assert not {name: verdict for name, verdict in found.items() if verdict.kind not in (*GOOD, "void")}


def test_random_programs_on_four_devices() -> None:
    programs = {str(seed): Program.random(seed) for seed in ON_FOUR if seed not in known.SEEDS}
    bad = {name: verdict for name, verdict in verdicts(programs, 4) if verdict.kind not in GOOD}
    assert not bad
