"""The documented plugin classes of all eras: every member, with the documented signature."""

from __future__ import annotations

import pytest

from tools.conformance import Finding, _problem, findings


def test_all_148_documented_members_conform() -> None:
    documented = [finding for finding in findings() if finding.documented]
    assert len(documented) == 148
    assert _problems(documented) == []


def test_so_do_the_public_members_that_the_pages_leave_out() -> None:
    further = [finding for finding in findings() if not finding.documented]
    assert len(further) > 130
    assert _problems(further) == []


def _problems(found: list[Finding]) -> list[str]:
    return [f"{finding.path}.{finding.member}: {finding.problem}" for finding in found if finding.problem]


class Plugin:
    @property
    def model(self) -> int:
        return 1

    def setup(self, model: int, more: int = 0) -> None: ...
    def reduce(self, tensor: int, op: str = "sum") -> None: ...
    def step(self, *args: int, **kwargs: int) -> None: ...
    def extra(self, needed: int) -> None: ...


@pytest.mark.parametrize(
    ("documented", "problem"),
    [
        ("model", None),
        ("setup(model)", None),
        ("step(batch, idx)", None),
        ("model()", "is documented as a method, but it is a property"),
        ("setup", "is documented as a property"),
        ("teardown()", "is missing"),
        ("setup(trainer)", "has model where the page has trainer"),
        ("setup(model, *args)", "does not take *args"),
        ("reduce(tensor, op='mean')", "has op='sum' where the page has 'mean'"),
        ("extra()", "needs needed, of which the page knows nothing"),
        ("setup(model, more=0, most=1)", "does not take most"),
    ],
)
def test_a_deviation_is_found(documented: str, problem: str | None) -> None:
    assert _problem(Plugin, documented) == problem
