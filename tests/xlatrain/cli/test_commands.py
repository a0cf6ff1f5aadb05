"""The command ``xlatrain`` itself: its list of subcommands, and what listing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.multiprocess.pod import ROOT
from xlatrain.cli import main

HELP_IN_A_NEW_PROCESS = """
import sys
from xlatrain.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert not {"torch", "jax", "jsonargparse"} & set(sys.modules), sorted(sys.modules)
"""


def test_help_lists_every_subcommand_and_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP_IN_A_NEW_PROCESS], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("    ") and not line.startswith("     ")]
    assert listed == ["fit", "validate", "test", "predict", "preflight", "launch", "goodput", "doctor", "ckpt", "shardings"]


def test_an_unknown_subcommand_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fitt"])
    assert end.value.code == 2
    assert "invalid choice: 'fitt' (choose from" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("xlatrain ")
