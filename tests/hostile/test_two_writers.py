"""Two runs at one path, or in one directory: nothing that was committed is destroyed, and the second run says so at its start."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import compiling, warm
from tests.hostile.two_writers import ROOT, drill
from tests.processes import PATIENCE_S
from torch_compat.callbacks import ModelCheckpoint
from torch_compat.demos.boring_classes import BoringModel
from torch_compat.trainer.trainer import Trainer
from xlatrain import checkpoint
from xlatrain.checkpoint import claims, filesystem, ownership, saving


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return warm.run(warm.OURS, ["-c", program], env=compiling.environment(), timeout=PATIENCE_S, cwd=ROOT)


def mark_of_the_dead() -> str:
    """The mark of a process of this host that has ended."""
    return run("from xlatrain.checkpoint import ownership; print(ownership.mark())").stdout.strip()


def payload(path: Path, mark: str) -> Path:
    directory = path / f"payload-{mark}"
    (directory / "arrays").mkdir(parents=True)
    (directory / "arrays" / "part").write_bytes(b"half")
    return directory


@pytest.mark.slow
def test_several_processes_save_to_one_path(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    assert drill(path, writers=3, saves=12, seed=1, kills=1) == ["saved all"] * 2
    assert checkpoint.verify(path).intact
    checkpoint.save(path, {"w": np.zeros(3)}, wait=True)  # the others are gone: what they left is, too
    assert len(list(path.iterdir())) == 2


def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    path, parent = tmp_path / "a.ckpt", os.getppid()
    living = f"{ownership.mark()[:8]}{parent:08x}{ownership._started(parent):08x}01234567"
    theirs, dead = payload(path, living), payload(path, mark_of_the_dead())
    elsewhere = payload(path, "f" * 32)
    temporary = path / f".tmp-CURRENT-{living}"
    temporary.touch()
    checkpoint.save(path, {"w": np.ones(3)}, wait=True)
    assert theirs.exists() and elsewhere.exists() and temporary.exists() and not dead.exists()
    checkpoint.clean(tmp_path)
    assert theirs.exists() and elsewhere.exists()
    os.utime(elsewhere / "arrays" / "part", (0, 0))
    assert checkpoint.clean(tmp_path) == [elsewhere]
    checkpoint.remove(path)
    assert theirs.exists() and not checkpoint.is_checkpoint(path)


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_commits_that_cross_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Another run commits between our payload and our commit record, or between our commit and our cleaning up."""
    path = tmp_path / "a.ckpt"
    program = f"""
import numpy as np
from xlatrain import checkpoint
checkpoint.save({str(path)!r}, {{"w": np.full(3, 7)}}, wait=True)
"""
    commit, calls = saving.write_record, itertools.count()

    def crossed(*arguments):
        if first == "theirs" and next(calls) == 0:
            run(program).check_returncode()
        record = commit(*arguments)
        if first == "ours" and next(calls) == 0:
            run(program).check_returncode()
        return record

    monkeypatch.setattr(saving, "write_record", crossed)
    checkpoint.save(path, {"w": np.ones(3)}, wait=True)
    assert checkpoint.open_checkpoint(path).restore_numpy()["w"].tolist() == ([1] * 3 if first == "theirs" else [7] * 3)
    assert checkpoint.verify(path).intact


def test_copies_of_another_run_stay(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.ckpt", {"w": np.ones(3)}, wait=True)
    durable = tmp_path / "durable"
    theirs, dead = payload(durable / "a.ckpt", "f" * 32), payload(durable / "a.ckpt", mark_of_the_dead())
    copies = checkpoint.DurableCopies(durable)
    copies.copy(tmp_path / "a.ckpt")
    copies.wait()
    assert theirs.exists() and not dead.exists() and checkpoint.verify(durable / "a.ckpt").intact


class Elsewhere:
    """The time, and a claim of a process of another host, which gives its signs of life as time passes."""

    def __init__(self, path: Path, alive: bool) -> None:
        self._path, self._alive = path, alive
        self.passed_s = 0.0
        self._write()

    def _write(self) -> None:
        facts = {"mark": "f" * 32, "host": "elsewhere", "pid": 7, "run": "1", "beat": int(self.passed_s // claims.BEAT_S)}
        filesystem.replace_atomically(filesystem.as_path(self._path), json.dumps(facts).encode())

    def monotonic(self) -> float:
        return self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds
        if self._alive:
            self._write()


class TestClaim:
    def test_is_of_one_process(self, tmp_path: Path) -> None:
        held = checkpoint.claim(tmp_path / "runs" / "1")
        again = checkpoint.claim(tmp_path / "runs" / "1")
        program = f"from xlatrain import checkpoint; checkpoint.claim({str(tmp_path / 'runs' / '1')!r})"
        done = run(program)
        assert f"1 is in use: process {os.getpid()} on host" in done.stderr and "give each run a dirpath" in done.stderr
        again.release()
        assert (tmp_path / "runs" / "1" / claims.NAME).exists()
        held.release()
        assert not (tmp_path / "runs").exists()  # it was made for the claim alone

    def test_that_of_a_killed_run_is_taken_over(self, tmp_path: Path) -> None:
        program = f"import os; from xlatrain import checkpoint; checkpoint.claim({str(tmp_path)!r}); os.kill(os.getpid(), 9)"
        assert run(program).returncode == -9
        assert (tmp_path / claims.NAME).exists()
        checkpoint.claim(tmp_path).release()
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("contents", [b"", b"{", b"[]", b"{}", b'{"mark": 1}', b"\xff", b"[" * 100_000])
    def test_one_that_says_nothing_counts_for_nothing(self, tmp_path: Path, contents: bytes) -> None:
        (tmp_path / claims.NAME).write_bytes(contents)
        checkpoint.claim(tmp_path).release()

    @pytest.mark.parametrize("alive", [True, False])
    def test_of_another_host_it_shows_by_signs_of_life(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
    ) -> None:
        elsewhere = Elsewhere(tmp_path / claims.NAME, alive)
        monkeypatch.setattr(claims, "time", elsewhere)
        if alive:
            with pytest.raises(checkpoint.DirectoryInUseError, match="process 7 on host elsewhere"):
                checkpoint.claim(tmp_path, "2")
        else:
            checkpoint.claim(tmp_path, "2").release()
            assert elsewhere.passed_s > 2 * claims.BEAT_S


SCRIPT = """
import sys, time
from torch_compat.callbacks import ModelCheckpoint
from torch_compat.demos.boring_classes import BoringModel
from torch_compat.trainer.trainer import Trainer

class Waits(BoringModel):
    def on_train_start(self):
        print("training", flush=True)
        sys.stdin.readline()

Trainer(accelerator="cpu", max_steps=2, limit_val_batches=0, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(sys.argv[1])]).fit(Waits())
"""


@pytest.mark.slow
def test_a_second_trainer_in_one_directory_is_told_at_its_start(tmp_path: Path) -> None:
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    first = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with first:
        assert first.stdin is not None and first.stdout is not None
        assert "training" in first.stdout.readline()
        model, second = BoringModel(), Trainer(accelerator="cpu", max_steps=2, callbacks=[ModelCheckpoint(tmp_path)], **options)
        with pytest.raises(checkpoint.DirectoryInUseError, match=f"process {first.pid} on host"):
            second.fit(model)
        assert second.global_step == 0
        first.stdin.write("\n")
        first.stdin.flush()
    assert first.returncode == 0
    assert [entry.suffix for entry in tmp_path.iterdir()] == [".ckpt"]
    Trainer(accelerator="cpu", max_steps=2, callbacks=[ModelCheckpoint(tmp_path)], **options).fit(BoringModel())
    assert not (tmp_path / claims.NAME).exists()
