"""The command ``xlatrain`` itself: its list of subcommands, and what listing them costs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.multiprocess.pod import ROOT
from xlatrain.cli import GROUP, OWN, main

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
    first = ["fit", "validate", "test", "predict", *OWN]
    assert listed == [*first, *sorted({entry.name for entry in entry_points(group=GROUP)} - set(first))]


def test_an_unknown_subcommand_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fitt"])
    assert end.value.code == 2
    assert "there is no command 'fitt'; did you mean 'fit'?" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("xlatrain ")


def test_scripts_for_tpus_are_listed_and_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tpu", "--help"]) == 0
    assert "  create     Ask for a TPU through a queued resource" in capfd.readouterr().out
    place = ("--name", "my-tpu", "--zone", "us-west4-a")
    assert main(["tpu", "launch", *place, "--plan", "plan.json", "--dry-run", "--", "-m", "torch_compat", "train.py"]) == 0
    assert "XLATRAIN_PLAN=plan.json" in capfd.readouterr().out
    assert main(["tpu", "lauch"]) == 2
    assert "did you mean 'launch'?" in capfd.readouterr().err


def test_examples_are_listed_and_copied_but_never_over_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    assert "llama.py " in capsys.readouterr().out
    assert main(["examples", "gpt.py", "--into", str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "gpt.py").read_text() == (ROOT / "examples" / "gpt.py").read_text()
    assert main(["examples", "gpt.py", "--into", str(tmp_path / "mine")]) == 2
    assert "is there already" in capsys.readouterr().err


def test_options_are_completed_in_bash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("xlatrain.cli.completion._options", {"launch": ["--plan", "--print"]}.get)
    monkeypatch.setattr("xlatrain.cli.names", lambda: ["fit", "launch"])
    assert main(["completion", "bash"]) == 0
    asks = "COMP_WORDS=(xlatrain launch --pl); COMP_CWORD=2; _xlatrain; echo ${COMPREPLY[@]}"
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", f"{script}\n{asks}"], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "--plan\n"
