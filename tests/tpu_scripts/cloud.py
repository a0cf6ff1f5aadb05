"""A cloud in a folder: the scripts run for real, with stand-ins for what reaches out of the machine first on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tpu_scripts"
STAND_INS = Path(__file__).parent / "stand_ins"
PLACE = ("--name", "my-tpu", "--zone", "us-west4-a")


class Cloud:
    """The stand-ins' state, and how to run a script against them."""

    def __init__(self, folder: Path, *states: str) -> None:
        self.folder = folder
        (folder / "states").write_text("".join(f"{state}\n" for state in states or ("ACTIVE",)))
        self.environment = {
            "PATH": f"{STAND_INS}:/usr/bin:/bin",
            "CLOUD": str(folder),
            "PYTHON": sys.executable,
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "PYTHONPATH": str(ROOT),
        }

    def run(self, script: str, *arguments: str, status: int = 0, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a script of ``tpu_scripts/``; ``status`` is the exit status that it must give."""
        done = subprocess.run(
            [str(SCRIPTS / script), *arguments],
            env=self.environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=self.folder,
        )
        assert done.returncode == status, f"{script} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    @property
    def calls(self) -> list[str]:
        """The calls of the stand-ins, one line for each."""
        path = self.folder / "calls"
        return [line.strip() for line in path.read_text().splitlines()] if path.exists() else []

    def worker(self, index: int, path: str) -> Path:
        """A file on a worker."""
        return self.folder / "workers" / str(index) / path

    def end_runs(self) -> None:
        """End what a test may have left running."""
        if (self.folder / "workers").exists():
            subprocess.run(
                [str(SCRIPTS / "stop.sh"), *PLACE, "--grace-seconds", "0"], env=self.environment, capture_output=True, check=False
            )


def shell_scripts() -> list[str]:
    """Every shell script that is kept here."""
    found = [*SCRIPTS.rglob("*.sh"), *(path for path in STAND_INS.iterdir() if path.is_file())]
    return sorted(str(path) for path in found if os.access(path, os.R_OK))
