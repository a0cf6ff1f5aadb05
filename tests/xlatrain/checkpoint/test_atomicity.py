"""Remains of a save that is killed, fails, or finds something else at the path; damage is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests import compiling, warm
from tests.processes import PATIENCE_S, wait_for
from xlatrain import checkpoint
from xlatrain.checkpoint import record, saving

ROOT = Path(checkpoint.__file__).parents[2]


def values(path) -> list[int]:
    return checkpoint.open_checkpoint(path).restore_numpy()["x"].tolist()


def save(path, value: int, **options) -> checkpoint.PendingSave:
    return checkpoint.save(path, {"x": np.full(3, value)}, {"host": str(value).encode()}, wait=True, **options)


SAVER = """
    import sys
    import numpy as np
    from xlatrain import checkpoint

    arrays = {f"w{i}": np.random.default_rng(i).standard_normal((1024, 1024)) for i in range(16)}
    pending = checkpoint.save(sys.argv[1], {"x": np.full(3, 2), **arrays}, {"host": b"2"})
    print("saving", flush=True)
    pending.wait()
    print("committed", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3])
def test_killed_save_leaves_the_previous_checkpoint(tmp_path, delay_s):
    path = tmp_path / "a.ckpt"
    save(path, 1)
    output, environment = tmp_path / "output", compiling.environment()
    command = ["-c", textwrap.dedent(SAVER), str(path)]
    saver = warm.server(warm.OURS, environment).start(command, environment, output, folder=ROOT)
    wait_for(lambda: saver.poll() is not None or (output.exists() and "saving\n" in output.read_text()))
    time.sleep(delay_s)
    saver.kill()
    saver.wait(PATIENCE_S)
    assert "saving\n" in output.read_text()
    committed = "committed" in output.read_text()
    # The kill may fall after the commit and before the word: either checkpoint is right, a mixture or none is not.
    assert values(path) in ([[2] * 3] if committed else [[1] * 3, [2] * 3])
    assert checkpoint.open_checkpoint(path).files["host"] == str(values(path)[0]).encode()

    save(path, 3)
    assert values(path) == [3] * 3
    assert len(list(path.iterdir())) == 2  # what the killed save left is gone


def test_kill_between_the_payload_and_the_pointer(tmp_path):
    """The last moment before the commit, deterministically: a child dies instead of writing the pointer."""
    path = tmp_path / "a.ckpt"
    save(path, 1)
    die = """
    import os, signal
    from xlatrain.checkpoint import filesystem
    filesystem.replace_atomically = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    """
    command = ["-c", textwrap.dedent(die) + textwrap.dedent(SAVER), str(path)]
    done = warm.run(warm.OURS, command, env=compiling.environment(), timeout=PATIENCE_S, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert len([entry for entry in path.iterdir() if record.is_payload_name(entry.name)]) == 2
    assert values(path) == [1] * 3


def test_first_save_killed_leaves_nothing_that_looks_like_a_checkpoint(tmp_path):
    path = tmp_path / "a.ckpt"
    dead = "from xlatrain.checkpoint import ownership; print(ownership.mark())"
    mark = subprocess.run([sys.executable, "-c", dead], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    (path / f"payload-{mark}").mkdir(parents=True)
    assert not checkpoint.is_checkpoint(path)
    with pytest.raises(checkpoint.CheckpointNotFoundError, match=r"a save was begun there, but never committed; .*ckpt ls"):
        checkpoint.open_checkpoint(path)
    save(path, 1)
    assert values(path) == [1] * 3 and len(list(path.iterdir())) == 2


def test_script_that_ends_without_waiting_commits(tmp_path):
    program = textwrap.dedent(SAVER).replace("pending.wait()", "sys.exit()")
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.ckpt")], cwd=ROOT, check=True)
    assert values(tmp_path / "a.ckpt") == [2] * 3


class TestFailedSave:
    def test_is_raised_by_wait_each_time_and_loses_nothing(self, tmp_path, monkeypatch):
        path = tmp_path / "a.ckpt"
        save(path, 1)
        monkeypatch.setattr(saving.filesystem, "write_durably", _no_space)
        pending = checkpoint.save(path, {"x": np.full(3, 2)}, {"host": b"2"})
        for _ in range(2):
            with pytest.raises(checkpoint.CheckpointError, match=r"saving .*a\.ckpt failed: .*No space left"):
                pending.wait()
        monkeypatch.undo()
        assert values(path) == [1] * 3
        save(path, 3)
        assert values(path) == [3] * 3

    def test_nobody_waited_for_is_raised_by_the_next_save(self, tmp_path, monkeypatch):
        monkeypatch.setattr(saving.filesystem, "write_durably", _no_space)
        checkpoint.save(tmp_path / "a.ckpt", {"x": np.full(3, 2)}, {"host": b"2"})
        with pytest.raises(checkpoint.CheckpointError, match=r"saving .*a\.ckpt failed"):
            save(tmp_path / "b.ckpt", 1)
        monkeypatch.undo()
        save(tmp_path / "b.ckpt", 1)
        assert values(tmp_path / "b.ckpt") == [1] * 3


def _no_space(path, data):
    raise OSError(28, "No space left on device", str(path))


class TestInFlight:
    """Actions on a path while a save is still being written there, or is to replace it."""

    @staticmethod
    def slow_save(path, value: int, gate: threading.Event, monkeypatch) -> checkpoint.PendingSave:
        """A save that commits only after ``gate`` is set."""
        write = saving.write_record

        def gated(*args):
            assert gate.wait(300)
            return write(*args)

        monkeypatch.setattr(saving, "write_record", gated)
        return checkpoint.save(path, {"x": np.full(3, value)})

    def test_replaced_checkpoint_is_removed_only_after_the_commit(self, tmp_path, monkeypatch):
        save(tmp_path / "old.ckpt", 1)
        gate = threading.Event()
        pending = self.slow_save(tmp_path / "new.ckpt", 2, gate, monkeypatch)
        pending.then_remove(tmp_path / "old.ckpt")
        assert not pending.done() and values(tmp_path / "old.ckpt") == [1] * 3
        gate.set()
        pending.wait()
        assert not (tmp_path / "old.ckpt").exists() and values(tmp_path / "new.ckpt") == [2] * 3

    def test_replaced_checkpoint_stays_when_the_save_fails(self, tmp_path, monkeypatch):
        save(tmp_path / "old.ckpt", 1)
        monkeypatch.setattr(saving, "write_record", _no_space)
        pending = checkpoint.save(tmp_path / "new.ckpt", {"x": np.zeros(3)})
        pending.then_remove(tmp_path / "old.ckpt")
        with pytest.raises(checkpoint.CheckpointError, match=r"new\.ckpt failed"):
            checkpoint.wait_for_saves()
        assert values(tmp_path / "old.ckpt") == [1] * 3

    def test_then_remove_after_the_commit_and_of_itself(self, tmp_path):
        save(tmp_path / "old.ckpt", 1)
        pending = save(tmp_path / "new.ckpt", 2)
        pending.then_remove(tmp_path / "old.ckpt")
        pending.then_remove(tmp_path / "new.ckpt")
        assert not (tmp_path / "old.ckpt").exists() and values(tmp_path / "new.ckpt") == [2] * 3

    @pytest.mark.parametrize("use", ["open", "remove"])
    def test_readers_and_removers_wait_for_it(self, tmp_path, monkeypatch, use):
        path = tmp_path / "a.ckpt"
        save(path, 1)
        gate = threading.Event()
        self.slow_save(path, 2, gate, monkeypatch)
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        if use == "open":
            assert values(path) == [2] * 3
        else:
            checkpoint.remove(path)
            assert not path.exists()
        timer.join()
        checkpoint.wait_for_saves()


class TestForeign:
    def test_file(self, tmp_path):
        path = tmp_path / "stock.ckpt"
        path.write_bytes(b"weights")
        with pytest.raises(checkpoint.ForeignPathError, match=r"stock\.ckpt is a file"):
            save(path, 1)
        with pytest.raises(checkpoint.ForeignPathError, match=r"stock\.ckpt is a file"):
            checkpoint.open_checkpoint(path)
        with pytest.raises(checkpoint.ForeignPathError, match=r"stock\.ckpt is a file"):
            checkpoint.remove(path)
        assert path.read_bytes() == b"weights"

    def test_directory(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("…")
        with pytest.raises(checkpoint.ForeignPathError, match=r"thesis\.tex"):
            save(tmp_path, 1)
        with pytest.raises(checkpoint.ForeignPathError, match=r"thesis\.tex"):
            checkpoint.remove(tmp_path)
        with pytest.raises(checkpoint.ForeignPathError, match="has no CURRENT"):
            checkpoint.open_checkpoint(tmp_path)
        assert (tmp_path / "thesis.tex").exists()

    def test_checkpoint_into_which_somebody_put_a_file(self, tmp_path):
        path = tmp_path / "a.ckpt"
        save(path, 1)
        (path / "notes.txt").write_text("keep")
        with pytest.raises(checkpoint.ForeignPathError, match=r"notes\.txt"):
            save(path, 2)
        assert values(path) == [1] * 3

    def test_link(self, tmp_path):
        save(tmp_path / "best.ckpt", 1)
        (tmp_path / "last.ckpt").symlink_to("best.ckpt")
        assert values(tmp_path / "last.ckpt") == [1] * 3
        with pytest.raises(checkpoint.ForeignPathError, match="symbolic link"):
            save(tmp_path / "last.ckpt", 2)
        checkpoint.remove(tmp_path / "last.ckpt")
        assert values(tmp_path / "best.ckpt") == [1] * 3

    def test_empty_directory_is_taken(self, tmp_path):
        save(tmp_path, 1)
        assert values(tmp_path) == [1] * 3


class TestDamage:
    @pytest.fixture
    def path(self, tmp_path) -> Path:
        save(tmp_path / "a.ckpt", 1)
        return tmp_path / "a.ckpt"

    @staticmethod
    def payload(path: Path) -> Path:
        return path / record.read_record(saving.filesystem.as_path(path)).payload

    def test_missing(self, tmp_path):
        with pytest.raises(checkpoint.CheckpointNotFoundError, match=r"nothing\.ckpt: the path does not exist"):
            checkpoint.open_checkpoint(tmp_path / "nothing.ckpt")

    def test_truncated_and_missing_files_are_all_named(self, path):
        arrays = sorted(file for file in (self.payload(path) / "arrays").rglob("*") if file.is_file() and file.stat().st_size > 1)
        os.truncate(arrays[0], arrays[0].stat().st_size - 1)
        arrays[1].unlink()
        with pytest.raises(checkpoint.CorruptCheckpointError) as caught:
            checkpoint.open_checkpoint(path)
        assert f"{arrays[1].name}: missing" in str(caught.value) and "2 of" in str(caught.value)

    def test_changed_host_file(self, path):
        (self.payload(path) / "files" / "host").write_bytes(b"2")
        with pytest.raises(checkpoint.CorruptCheckpointError, match=r"files/host does not have the contents that were committed"):
            checkpoint.open_checkpoint(path).files["host"]

    def test_changed_manifest(self, path):
        manifest = self.payload(path) / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"3", b"4", 1))
        with pytest.raises(checkpoint.CorruptCheckpointError, match="not the manifest that was committed"):
            checkpoint.open_checkpoint(path)

    @pytest.mark.parametrize("contents", [b"", b"{", b'{"format": "xlatrain-checkpoint", "version": 2}', b"payload-1\n"])
    def test_torn_pointer(self, path, contents):
        (path / "CURRENT").write_bytes(contents)
        with pytest.raises(checkpoint.CorruptCheckpointError, match="CURRENT is not a commit record"):
            checkpoint.open_checkpoint(path)
        with pytest.raises(checkpoint.CorruptCheckpointError, match="CURRENT is not a commit record"):
            save(path, 2)  # it would delete payloads that may be worth recovering
        assert not checkpoint.is_checkpoint(path)

    def test_later_version(self, path):
        pointer = path / "CURRENT"
        pointer.write_bytes(pointer.read_bytes().replace(b'"version": 2', b'"version": 99'))
        with pytest.raises(checkpoint.CorruptCheckpointError, match="version 99"):
            checkpoint.open_checkpoint(path)

    def test_missing_payload(self, path):
        self.payload(path).rename(path.parent / "elsewhere")
        with pytest.raises(checkpoint.CorruptCheckpointError, match=r"the committed payload payload-.* is missing"):
            checkpoint.open_checkpoint(path)


class TestDirectory:
    def test_newest_is_by_commit_not_by_file_times(self, tmp_path):
        for value, name in enumerate(["b.ckpt", "a.ckpt", "c.ckpt"]):
            save(tmp_path / name, value)
        save(tmp_path / "a.ckpt", 7)
        for name in ("b.ckpt", "c.ckpt"):
            os.utime(tmp_path / name / "CURRENT", (2**33, 2**33))
            os.utime(tmp_path / name, (2**33, 2**33))
        (tmp_path / "other").mkdir()
        (tmp_path / "file.ckpt").write_bytes(b"")
        assert checkpoint.newest(tmp_path) == tmp_path / "a.ckpt"

    def test_newest_when_the_clock_was_set_back(self, tmp_path, monkeypatch):
        save(tmp_path / "a.ckpt", 1)
        monkeypatch.setattr(record.time, "time_ns", lambda: 1000)
        save(tmp_path / "b.ckpt", 2)
        assert checkpoint.newest(tmp_path) == tmp_path / "b.ckpt"
        times = [checkpoint.commit_time_ns(tmp_path / name) for name in ("a.ckpt", "b.ckpt")]
        assert None not in times and times == sorted(times)
        assert checkpoint.commit_time_ns(tmp_path) is None

    def test_newest_of_nothing(self, tmp_path):
        assert checkpoint.newest(tmp_path) is None and checkpoint.newest(tmp_path / "missing") is None

    def test_remove(self, tmp_path):
        save(tmp_path / "a.ckpt", 1)
        checkpoint.remove(tmp_path / "a.ckpt")
        checkpoint.remove(tmp_path / "a.ckpt")
        assert not (tmp_path / "a.ckpt").exists()

    def test_check_shared_leaves_nothing(self, tmp_path):
        checkpoint.check_shared(tmp_path / "run")
        assert list((tmp_path / "run").iterdir()) == []
