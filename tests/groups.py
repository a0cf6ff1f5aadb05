"""A pytest plugin: which tests run one after another in the same worker of pytest-xdist, and in what order.

pytest-xdist's own ``--dist loadgroup`` writes the group into a test's id, which pytest 9.2 does not let it do: every test is
then a group of its own, silently, and what tests share is made again in each worker (pytest-xdist#1386).
"""

from __future__ import annotations

import re

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# The longest of the groups that hold a slow test, longest first: started before the others of these, so that no worker is left
# alone with one at the end. A name that is missing here costs time only.
_LONGEST = (
    "test_fuzz.py",
    "test_jax_module.py",
    "test_jax_examples.py",
    "test_parity.py metrics",
    "test_docs.py",
    "test_mesh_axes.py",
    "test_parity.py precision",
    "test_parity.py semantics",
    "test_parity.py asked",
    "test_parity.py control",
    "test_parity.py evaluation",
    "test_fit.py",
    "test_demo.py",
    "test_elastic.py",
    "test_parity.py callbacks",
    "test_parity.py models",
    "test_generation.py",
    "test_parity.py manual",
    "test_moments.py",
    "test_preflight.py",
    "test_context_axis.py",
    "test_parity.py basics",
    "test_parity.py surroundings",
    "test_mesh_models.py",
    "test_experts.py",
    "test_parity.py cli",
    "test_fire_drill.py",
    "test_parity.py wild",
    "test_parity.py masked_rows",
    "test_jax_callbacks.py",
    "test_depth.py",
    "test_restarts.py",
    "test_ddp_spawn.py",
    "test_parity.py ways_of_a_step",
    "test_command.py",
    "test_install.py",
    "test_splash.py",
    "test_facade.py",
    "test_parity.py raw_loops",
    "test_trainer_runs.py",
)


class GroupScheduling(LoadScopeScheduling):
    """Gives a worker a whole group at a time."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The file, whose tests share its fixtures; of parity tests the file and the script, whose runs they share."""
    path, _, test = nodeid.partition("::")
    script = re.search(r"\[(\w+)", test) if path.endswith("parity/test_parity.py") else None
    return f"{path} {script[1]}" if script else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups of fast tests first, those that hold one marked ``slow`` last, the longest of them first; otherwise as collected."""
    slow = {group_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: _place(group_of(item.nodeid), slow))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling | None:
    """The scheduler that ``--dist loadgroup`` means here."""
    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # xdist would have the groups with most tests first, whatever they take
    return GroupScheduling(config, log)


def _place(group: str, slow: set[str]) -> int:
    if group not in slow:
        return -1
    name = group.rpartition("/")[2]
    return _LONGEST.index(name) if name in _LONGEST else len(_LONGEST)
