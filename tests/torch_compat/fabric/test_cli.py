"""``fabric run``: what a Fabric takes of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_compat.fabric import Fabric
from torch_compat.fabric.cli import command
from torch_compat.utilities.exceptions import MisconfigurationException

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
import sys
from lightning.fabric import Fabric
fabric = Fabric()
print(sys.argv[1:], fabric.world_size, type(fabric.strategy).__name__, type(fabric._strategy.precision).__name__)
if "fail" in sys.argv:
    raise ValueError("the script's")
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_script_gets_its_own_arguments_and_fabric_the_rest(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = (
        "--accelerator",
        "cpu",
        "script.py",
        "--lr",
        "0.1",
        "--devices=2",
        "--precision",
        "bf16-true",
        "fail",
        "--",
        "--devices",
    )
    done = run("torch_compat.fabric", "run", *options, cwd=tmp_path)
    assert done.stdout == "['--lr', '0.1', 'fail', '--devices'] 2 DDPStrategy HalfPrecision\n"
    assert done.returncode == 1
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path / "script.py"}", line 7')


def test_as_a_module_under_stocks_name(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("torch_compat", "-m", "lightning.fabric.cli", "script.py", "--accelerator", "cpu", "own", cwd=tmp_path)
    assert done.stdout == "['own'] 1 SingleDeviceStrategy Precision\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nowhere.py"], "script 'nowhere.py' does not exist"),
        (
            ["run", __file__, "--num-nodes", "2", "--node-rank", "2"],
            "--node-rank 2: expected the index of this host, from 0 to 1",
        ),
        (["run", __file__, "--accelerator", "mps"], "invalid choice: 'mps'"),
        (["fit", __file__], "invalid choice: 'fit'"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_consolidate_is_refused() -> None:
    with pytest.raises(SystemExit, match="xlatrain ckpt convert"):
        command(["consolidate", "folder"])


class TestFabricUnderTheCommand:
    @pytest.fixture(autouse=True)
    def started_by_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LT_CLI_USED", "1")
        monkeypatch.setenv("LT_ACCELERATOR", "cpu")
        monkeypatch.setenv("LT_DEVICES", "2")
        monkeypatch.setenv("LT_NUM_NODES", "1")

    def test_it_takes_what_was_chosen(self) -> None:
        assert Fabric().world_size == 2
        assert Fabric(devices=2, accelerator="cpu").world_size == 2

    def test_what_the_code_says_otherwise_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"Your code has `Fabric\(devices=4, \.\.\.\)`, the command line `--devices=2`"):
            Fabric(devices=4)

    def test_it_has_launched(self) -> None:
        with pytest.raises(RuntimeError, match="This script was launched through the CLI"):
            Fabric().launch()

    def test_a_run_of_its_own_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"Overriding `Fabric\.run\(\)` and launching from the CLI is not allowed"):
            type("Own", (Fabric,), {"run": lambda self: None})()

    def test_processes_of_stocks_command_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(MisconfigurationException, match=r"python -m torch_compat\.fabric run"):
            Fabric()


def test_variables_alone_are_taken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables win over the code without the command, as in stock."""
    monkeypatch.setenv("LT_DEVICES", "2")
    assert Fabric(accelerator="cpu", devices=4).world_size == 2
