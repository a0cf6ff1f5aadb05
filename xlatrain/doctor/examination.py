"""An examination of a machine and its Python environment."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from xlatrain.doctor.accelerators import check_accelerators, present_accelerators
from xlatrain.doctor.finding import Finding
from xlatrain.doctor.probe import probe
from xlatrain.doctor.storage import check_storage, examine_storage
from xlatrain.doctor.variables import check_variables, relevant_variables
from xlatrain.doctor.versions import check_versions, installed_versions

GROUP = "xlatrain.checks"


@dataclass
class Examination:
    """The facts that were looked up, and the findings.

    Attributes:
        system: Python, operating system, processor cores.
        versions: package → version, None where it is not installed.
        accelerators: ``"cuda"``, ``"tpu"`` → chips on this machine.
        probe: JAX's devices and the collective test; ``{"error": …}`` where JAX did not start.
        environment: the variables that matter and are set.
        storage: free space and the compilation cache.
        findings: faults and warnings.
    """

    system: dict[str, Any]
    versions: dict[str, str | None]
    accelerators: dict[str, int]
    probe: dict[str, Any]
    environment: dict[str, str]
    storage: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether there is no fault; warnings are allowed."""
        return not any(finding.level == "fault" for finding in self.findings)


def examine(timeout_s: float = 60.0, environment: Mapping[str, str] = os.environ, *, joins: bool = False) -> Examination:
    """Look at everything; takes a few seconds.

    Args:
        timeout_s: how long JAX may take to start its devices and run the collective test.
        environment: the environment to look at.
        joins: join the world that the environment describes, for a collective over the devices of all of its processes.
    """
    found = Examination(
        system={
            "python": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
            "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        },
        versions=installed_versions(),
        accelerators=present_accelerators(),
        probe=probe(timeout_s, environment, joins=joins),
        environment=relevant_variables(environment),
        storage=examine_storage(),
    )
    found.findings += check_versions(found.versions)
    found.findings += check_accelerators(found.accelerators, found.probe, found.versions, environment)
    found.findings += check_variables(environment, launched=joins)
    found.findings += check_storage(found.storage)
    for entry in entry_points(group=GROUP):
        try:
            found.findings += entry.load()(found)
        except Exception as error:  # a broken package is what a doctor is called for
            problem = f"its check failed: {type(error).__name__}: {error}"
            found.findings.append(Finding("fault", entry.name, problem, "reinstall it: pip install --force-reinstall xlatrain"))
    return found
