"""Every import of the packages is in ``pyproject.toml``, and every requirement there is imported."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = {"xlatrain", "torch_compat"}
BY_OTHERS = {"tensorboard"}
"""Needed by what our files import: ``torch.utils.tensorboard``."""
LOOKED_FOR = {"mpi4py", "omegaconf", "torchvision"}
"""Used where somebody has installed them, named in an error or left out where not."""


def names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", one)[0].lower().replace("_", "-") for one in requirements}


def imported() -> dict[str, str]:
    """Top-level package → a file that imports it, of those that are not Python's."""
    found = {}
    for package in sorted(OURS):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    modules = [node.module]
                else:
                    continue
                found.update({module.partition(".")[0]: str(path.relative_to(ROOT)) for module in modules})
    return {name: where for name, where in found.items() if name not in sys.stdlib_module_names | OURS}


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = names(project["dependencies"])
    optional = names(one for extra, group in project["optional-dependencies"].items() if extra != "dev" for one in group)
    distributions = importlib.metadata.packages_distributions()
    used = {}
    for module, where in imported().items():
        used.update({name.lower().replace("_", "-"): where for name in distributions.get(module, [module])})
    assert {name: where for name, where in used.items() if name not in needed | optional | LOOKED_FOR} == {}
    assert sorted(needed - used.keys() - BY_OTHERS) == []
