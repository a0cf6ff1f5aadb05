"""Forked programs run and end as those do that Python starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[1]
PROGRAM = """
import os, sys
print(__name__, sys.argv, os.environ["TOLD"], os.getcwd(), sys.stdin.read())
print("wrong", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_as_python_does(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "some_program.py"
    script.write_text(PROGRAM)
    command = {"-c": ["-c", PROGRAM], "-m": ["-m", "some_program"], "script": [str(script)]}[kind] + ["a", "b c"]
    environment = {**os.environ, "TOLD": "something", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    started = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    forked = warm.run(("json",), command, env=environment, timeout=300, cwd=tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (3, started.stdout, started.stderr)


def test_the_first_failure_ends_the_pod() -> None:
    program = "import os, sys, time; sys.exit(4) if os.environ['XLATRAIN_PROCESS_ID'] == '1' else time.sleep(600)"
    assert warm.run_pod(["-c", program], 2, 1, env=os.environ, timeout=300, preloaded=("json",)).returncode == 4


def test_warnings_are_the_program_s_own_affair() -> None:
    """Not that of whoever had a program run first, when the imports were made."""
    command, quiet = ["-c", "import warnings; warnings.warn('seen')"], {**os.environ, "PYTHONWARNINGS": "ignore"}
    loud = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    said = [warm.run(("json", "string"), command, env=env, timeout=300).stderr for env in (quiet, loud, quiet)]
    assert ["UserWarning: seen" in text for text in said] == [False, True, False]
