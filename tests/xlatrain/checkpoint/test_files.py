"""Checkpoints that are one file: whole or absent at any moment, every byte compared, and files and directories in one place."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from xlatrain import checkpoint
from xlatrain.checkpoint import filesystem
from xlatrain.cli.torch_file import TorchFile

ROOT = Path(__file__).parents[3]


def save(path: Path, value: float, **options) -> None:
    state = {"state_dict": {"w": torch.full((300,), value)}, "epoch": 1}
    checkpoint.save_file(path, lambda: lambda file: torch.save(state, file), wait=True, **options)


def value_at(path: Path) -> float:
    loaded = torch.load(path, weights_only=True)["state_dict"]["w"]
    assert len(set(loaded.tolist())) == 1
    return float(loaded[0])


def test_a_file_is_torchs_and_says_what_it_is(tmp_path):
    save(tmp_path / "new" / "a.ckpt", 1.0, facts={"step": 3, "metrics": {"loss": 0.5}})
    path = tmp_path / "new" / "a.ckpt"
    for options in ({}, {"mmap": True}):
        assert torch.load(path, **options)["epoch"] == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["a.ckpt"] and path.stat().st_mode & 0o777 == 0o666 & ~umask()
    (entry,) = checkpoint.entries(path.parent)
    assert entry.facts == {"step": 3, "metrics": {"loss": 0.5}} and entry.size_bytes == path.stat().st_size
    first = checkpoint.commit_time_ns(path)
    save(path, 2.0)
    assert value_at(path) == 2.0 and checkpoint.commit_time_ns(path) > first and checkpoint.verify(path).intact
    with pytest.raises(ValueError, match="facts of a checkpoint file"):
        save(path, 3.0, facts={"long": "x" * 70_000})
    with pytest.raises(checkpoint.ForeignPathError, match="is a file, not a checkpoint directory"):
        checkpoint.open_checkpoint(path)
    assert value_at(path) == 2.0


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_damage_at_every_byte_is_found(tmp_path):
    path = tmp_path / "a.ckpt"
    state = {"w": torch.arange(3.0)}
    checkpoint.write_file(path, lambda file: torch.save(state, file), {"step": 1})
    whole = path.read_bytes()

    def intact() -> bool:
        try:
            return checkpoint.verify(path).intact
        except checkpoint.CheckpointError:
            return False

    assert intact()
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1 << index % 8]) + whole[index + 1 :])
        assert not intact(), index
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert not intact(), length
    path.write_bytes(whole + b"more")
    assert not intact()
    with path.open("rb") as file, pytest.raises(checkpoint.CorruptCheckpointError, match="record at its end is damaged"):
        checkpoint.check_body(path, file)


def test_files_and_directories_replace_each_other(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    times = []
    for exchanges in (True, False):  # NFS cannot exchange names
        if not exchanges:
            monkeypatch.setattr(filesystem, "_exchanged", lambda *_: False)
        for number in range(2):
            save(path, number)
            assert value_at(path) == number
            times.append(checkpoint.commit_time_ns(path))
            checkpoint.save(path, {"w": np.full(3, number)}, wait=True)
            assert checkpoint.open_checkpoint(path).restore_numpy()["w"].tolist() == [number] * 3
            times.append(checkpoint.commit_time_ns(path))
            assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]
    assert times == sorted(set(times))


def test_what_is_not_ours_stays(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "stock.ckpt")
    (tmp_path / "notes.ckpt").write_text("mine")
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "folder.ckpt" / "notes").write_text("mine")
    (tmp_path / ".tmp-mine").write_text("mine")
    assert checkpoint.entries(tmp_path) == [] and not checkpoint.is_checkpoint(tmp_path / "stock.ckpt")
    assert checkpoint.verify(tmp_path / "stock.ckpt").intact  # by the archive's own checksums
    with pytest.raises(checkpoint.ForeignPathError, match="with files that xlatrain did not save"):
        save(tmp_path / "folder.ckpt", 1.0)
    (tmp_path / "empty.ckpt").touch()
    for name in ("stock.ckpt", "notes.ckpt", "empty.ckpt"):
        with pytest.raises(checkpoint.ForeignPathError, match="was not saved by xlatrain"):
            checkpoint.save(tmp_path / name, {"w": np.ones(2)}, wait=True)
    with pytest.raises(checkpoint.ForeignPathError, match=r"neither xlatrain nor torch\.save wrote"):
        checkpoint.remove(tmp_path / "notes.ckpt")
    checkpoint.clean(tmp_path, older_than_s=0)
    assert (tmp_path / ".tmp-mine").exists()
    checkpoint.remove(tmp_path / "stock.ckpt")  # a ModelCheckpoint that goes on with stock's run replaces its files
    assert not (tmp_path / "stock.ckpt").exists()


def test_retention_counts_files_and_directories_alike(tmp_path):
    for step in range(1, 6):
        facts = {"step": step, "metrics": {"loss": abs(step - 2)}}
        if step % 2:
            save(tmp_path / f"{step}.ckpt", step, facts=facts)
        else:
            checkpoint.save(tmp_path / f"{step}.ckpt", {"w": np.ones(2)}, facts=facts, wait=True)
    (tmp_path / "last.ckpt").symlink_to("1.ckpt")
    assert [entry.path.name for entry in checkpoint.entries(tmp_path)] == [f"{step}.ckpt" for step in (5, 4, 3, 2, 1)]
    assert checkpoint.newest(tmp_path) == tmp_path / "5.ckpt"
    removed = checkpoint.prune(tmp_path, checkpoint.Retention(best=1, monitor="loss"))
    assert [path.name for path in removed] == ["3.ckpt", "4.ckpt"]


def test_durable_copies_of_files(tmp_path):
    copies = checkpoint.DurableCopies(tmp_path / "durable", checkpoint.Retention(last=1))
    for step in (1, 2):
        save(tmp_path / f"{step}.ckpt", step, facts={"step": step})
        copies.copy(tmp_path / f"{step}.ckpt")
    checkpoint.save(tmp_path / "3.ckpt", {"w": np.ones(2)}, wait=True)
    copies.copy(tmp_path / "3.ckpt")
    save(tmp_path / "3.ckpt", 3, facts={"step": 3})  # a file in place of a directory, there too
    copies.copy(tmp_path / "3.ckpt")
    copies.wait()
    assert [path.name for path in (tmp_path / "durable").iterdir()] == ["3.ckpt"]
    assert copies.newest() == ("3.ckpt", checkpoint.commit_time_ns(tmp_path / "3.ckpt"))
    fetched = copies.fetch("3.ckpt", tmp_path / "again")
    assert value_at(fetched) == 3.0 and fetched.read_bytes() == (tmp_path / "3.ckpt").read_bytes()


WRITER = """
    import os, signal, sys, torch
    from xlatrain import checkpoint
    from xlatrain.checkpoint import filesystem

    class Dying:
        def __init__(self, file, left):
            self.file, self.left = file, left

        def write(self, data):
            data = bytes(data)
            if self.left <= len(data):
                self.file.write(data[: self.left])
                self.file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= len(data)
            return self.file.write(data)

    def die(moment, path):
        put, init = filesystem.put_in_place, checkpoint.BodyWriter.__init__

        def dying_put(new, path):
            if moment == "renamed":
                put(new, path)
            os.kill(os.getpid(), signal.SIGKILL)

        filesystem.put_in_place = dying_put
        if moment.isdigit():
            checkpoint.BodyWriter.__init__ = lambda self, file: init(self, Dying(file, int(moment)))
        checkpoint.write_file(path, lambda file: torch.save({"state_dict": {"w": torch.full((300,), 2.0)}}, file))

    for path in sys.argv[1:]:
        child = os.fork()
        if child == 0:
            die(os.path.basename(os.path.dirname(path)), path)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, path
"""


def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path):
    program = tmp_path / "writer.py"
    program.write_text(textwrap.dedent(WRITER))
    paths = []
    for before in ("file", "directory", "nothing"):
        for moment in ("0", "700", "complete", "renamed"):  # bytes written; after the fsync; after the rename
            path = tmp_path / before / moment / "a.ckpt"
            path.parent.mkdir(parents=True)
            if before == "file":
                save(path, 1.0)
            elif before == "directory":
                checkpoint.save(path, {"w": np.ones(3)}, wait=True)
            paths.append(path)
    subprocess.run([sys.executable, str(program), *map(str, paths)], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    for path in paths:
        before, moment = path.parts[-3:-1]
        if moment == "renamed":
            assert value_at(path) == 2.0 and checkpoint.verify(path).intact
        elif before == "nothing":
            assert not path.exists() and checkpoint.entries(path.parent) == []
        else:
            assert checkpoint.verify(path).intact and path.is_dir() == (before == "directory")
        checkpoint.clean(path.parent)
        assert [entry.name for entry in path.parent.iterdir()] == (["a.ckpt"] if path.exists() else [])


def test_tensors_are_shown_without_torch(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    state = {
        "state_dict": {"w": weight, "tied": weight, "column": weight[:, 1], "half": weight.bfloat16(), "none": torch.ones(0, 2)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3)}}}],
        "parameter": torch.nn.Parameter(weight),
        "small": weight.to(torch.uint16),
        "other": Path("x"),
    }
    torch.save(state, tmp_path / "a.ckpt")
    opened = TorchFile(str(tmp_path / "a.ckpt"))
    read = opened.restore_numpy(list(opened.array_metadata()))
    assert {name: value.astype(np.float64).tolist() for name, value in read.items()} == {
        **{name: weight.tolist() for name in ("state_dict/w", "state_dict/tied", "state_dict/half", "parameter", "small")},
        "state_dict/column": [1, 4],
        "state_dict/none": [],
        "optimizer_states/0/state/0/step": 3,
    }
    assert opened.array_metadata()["state_dict/half"].dtype == "bfloat16"
