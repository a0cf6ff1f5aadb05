"""The plan: the findings of an examination, in a small file that a run takes and is compared with.

``XLATRAIN_PLAN=plan.json`` (``xlatrain launch --plan`` sets it). A run that chooses no strategy takes the plan's mesh, sharding
rules and recomputation; every run says where its first compiled step differs from what was examined.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xlatrain.preflight.report import Report

PLAN = "plan.json"
BEST_PLAN = "best_plan.json"
"""Of what a search ranks first."""
VARIABLE = "XLATRAIN_PLAN"
"""Environment variable: the plan of this run."""
_TOLERANCE = 0.02
_KEYS = ("topology", "num_slices", "chips", "mesh", "parameters", "bytes_per_chip", "collectives", "settings", "versions")


class PlanError(ValueError):
    """A file that is no plan."""


def plan_of(report: Report) -> str:
    """The text of the plan file."""
    found = report.to_dict()
    training = next(step for step in reversed(found["steps"]) if step["runs"])
    plan = {key: found[key] for key in _KEYS}
    plan |= {key: training[key] for key in ("bytes_per_chip", "collectives", "stablehlo")}
    return json.dumps({"plan": 1, "fits": report.fits, **plan}, indent=1) + "\n"


def write_plan(report: Report, path: Path) -> None:
    """The plan of a report, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(plan_of(report))
    temporary.replace(path)


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A plan file.

    Raises:
        PlanError: it is missing, or no plan.
    """
    try:
        plan = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{VARIABLE}={os.fspath(path)}: not a plan of `xlatrain preflight` ({error})") from error
    if not isinstance(plan, dict) or plan.get("plan") != 1:
        raise PlanError(f'{VARIABLE}={os.fspath(path)}: not a plan of `xlatrain preflight`: it has no "plan": 1')
    return plan


def differences(plan: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The differences of a run from its plan, in words; memory and collectives by more than 2 %.

    Args:
        found: keys as in the plan; what is missing is not compared.
    """
    told = []
    for key in ("mesh", "parameters"):
        if key in found and found[key] != plan[key]:
            told.append(f"{key}: planned {plan[key]}, now {found[key]}")
    for key, value in found.get("settings", {}).items():
        if key in plan["settings"] and plan["settings"][key] != value:
            told.append(f"{key}: planned {plan['settings'][key]}, now {value}")
    if "total" in found:
        told += _numbers("memory per chip in bytes", plan["bytes_per_chip"]["total"], found["total"])
    if "collectives" in found:
        planned, now = _bytes_by_axis(plan["collectives"]), _bytes_by_axis(found["collectives"])
        for axis in sorted({*planned, *now}):
            told += _numbers(f"bytes of collectives on {axis}", planned.get(axis, 0), now.get(axis, 0))
    for package, version in plan["versions"].items():
        if found.get("versions", {}).get(package, version) != version:
            told.append(f"{package}: planned {version}, now {found['versions'][package]}")
    stored = plan.get("stablehlo")
    if stored is not None and found.get("stablehlo", stored["sha256"]) != stored["sha256"]:
        told.append(f"the program: its StableHLO is not that of {stored['file']}")
    return told


def _numbers(what: str, planned: int, now: int) -> list[str]:
    if abs(now - planned) <= _TOLERANCE * max(planned, 1):
        return []
    return [f"{what}: planned {planned:,}, now {now:,}"]


def _bytes_by_axis(collectives: Mapping[str, Mapping[str, Mapping[str, int]]]) -> dict[str, int]:
    return {axis: sum(one["bytes"] for one in kinds.values()) for axis, kinds in collectives.items()}
