"""Damaged and malicious checkpoints: every one is a named error, in little time, and its neighbours are listed."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hostile.damage import commit, damages, manifests, pointers, safetensors_headers
from xlatrain import checkpoint
from xlatrain.cli.ckpt import main as ckpt
from xlatrain.init.pretrained import open_safetensors
from xlatrain.init.safetensors import SafetensorsError, SafetensorsFile

VALUES = {"w": np.arange(600, dtype=np.float32).reshape(20, 30), "b": np.arange(7), "none": np.zeros((0, 3))}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "a.ckpt", VALUES, {"note": b"host state"}, facts={"step": 3}, wait=True)
    checkpoint.save(tmp_path / "b.ckpt", VALUES, {"note": b"host state"}, facts={"step": 4}, wait=True)
    return tmp_path / "a.ckpt"


def judge(path: Path, what: str) -> None:
    """Damage is named by whoever reads everything; whoever reads values gets those that were saved, or an error by name."""
    try:
        found = checkpoint.verify(path)
    except checkpoint.CheckpointError:
        pass
    else:
        assert not found.intact, what
        with pytest.raises(checkpoint.CorruptCheckpointError):
            found.raise_if_damaged()
    try:
        opened = checkpoint.open_checkpoint(path)
        read, note = opened.restore_numpy(), opened.files["note"]
    except (checkpoint.CheckpointError, KeyError):
        pass
    else:
        assert set(read) <= set(VALUES) and all(np.array_equal(value, VALUES[name]) for name, value in read.items()), what
        assert note == b"host state", what
    assert "b.ckpt" in [entry.path.name for entry in checkpoint.entries(path.parent) if not entry.problem], what
    assert checkpoint.newest(path.parent) is not None, what


@pytest.mark.timeout(300)
def test_every_kind_of_damage_at_every_file(saved: Path) -> None:
    for what, path in damages(saved, count=150, seed=1):
        judge(path, what)


@pytest.mark.timeout(300)
def test_manifests_that_no_save_writes(saved: Path) -> None:
    manifest = json.loads(next(saved.glob("payload-*/manifest.json")).read_bytes())
    for what, text in list(manifests(manifest))[::3]:
        commit(saved, text)
        try:
            opened = checkpoint.open_checkpoint(saved)
            opened.restore_numpy()
            assert checkpoint.verify(saved) is not None
        except checkpoint.CheckpointError as error:
            assert len(str(error)) < 2000, what
        assert "b.ckpt" in [entry.path.name for entry in checkpoint.entries(saved.parent) if not entry.problem], what
        checkpoint.prune(saved.parent, checkpoint.Retention(last=5, best=1, monitor="x", every_n_steps=2))


def test_pointers_that_no_save_writes(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((saved / "CURRENT").read_bytes())
    for what, text in pointers(record):
        (saved / "CURRENT").write_bytes(text)
        for use in (checkpoint.open_checkpoint, checkpoint.verify):
            try:
                use(saved)
            except checkpoint.CheckpointError as error:
                assert len(str(error)) < 2000, what
        assert checkpoint.is_checkpoint(saved) in (True, False)
        assert ckpt(["ls", str(saved.parent)]) == 0, what
        assert "b.ckpt" in capsys.readouterr().out, what


def test_every_bit_of_the_commit_record_counts(saved: Path) -> None:
    pointer = saved / "CURRENT"
    written = pointer.read_bytes()
    for position in range(len(written) - 1):  # the last is the end of the line
        for bit in range(8):
            damaged = bytearray(written)
            damaged[position] ^= 1 << bit
            pointer.write_bytes(damaged)
            with pytest.raises(checkpoint.CheckpointError):
                checkpoint.open_checkpoint(saved)
    pointer.write_bytes(written)


def test_one_damaged_directory_does_not_hide_its_neighbours(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, damage in enumerate((_pipe, _closed, _link_to_itself, _directory)):
        other = saved.parent / f"c{number}.ckpt"
        shutil.copytree(saved, other)
        damage(other)
    assert ckpt(["ls", str(saved.parent)]) == 0
    assert {"a.ckpt", "b.ckpt"} <= set(capsys.readouterr().out.split())
    checkpoint.save(saved.parent / "d.ckpt", VALUES, wait=True)  # which looks at all of them, for the time of the newest
    for other in saved.parent.glob("c*.ckpt"):
        other.chmod(0o700)


def _pipe(path: Path) -> None:
    (path / "CURRENT").unlink()
    os.mkfifo(path / "CURRENT")


def _closed(path: Path) -> None:
    path.chmod(0)


def _link_to_itself(path: Path) -> None:
    (path / "CURRENT").unlink()
    (path / "CURRENT").symlink_to("CURRENT")


def _directory(path: Path) -> None:
    (path / "CURRENT").unlink()
    (path / "CURRENT").mkdir()


def test_a_payload_that_is_a_link_is_refused(saved: Path) -> None:
    payload = next(saved.glob("payload-*"))
    shutil.move(payload, saved.parent / "elsewhere")
    payload.symlink_to(saved.parent / "elsewhere")
    with pytest.raises(checkpoint.CorruptCheckpointError, match="is a symbolic link, which no save makes"):
        checkpoint.open_checkpoint(saved)


def test_every_file_has_a_digest(saved: Path) -> None:
    payload = next(saved.glob("payload-*"))
    stored = {file.relative_to(payload).as_posix() for file in payload.rglob("*") if file.is_file()} - {"manifest.json"}
    assert set(json.loads((payload / "manifest.json").read_bytes())["digests"]) == stored


class TestSafetensors:
    @staticmethod
    def write(path: Path, header: bytes) -> Path:
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
        return path

    def test_headers_that_describe_something_else(self, tmp_path: Path) -> None:
        for what, header in safetensors_headers():
            with pytest.raises(SafetensorsError) as caught:
                SafetensorsFile(self.write(tmp_path / "x.safetensors", header))
            assert len(str(caught.value)) < 1000, what

    def test_no_ordinary_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "x.safetensors")
        with pytest.raises(SafetensorsError, match="is not an ordinary file"):
            open_safetensors(tmp_path / "x.safetensors")

    @pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "..", "", "a/b", "a\\b", "a\0b", 7, None, ["a"]])
    def test_an_index_that_leads_out(self, tmp_path: Path, name: Any) -> None:
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(SafetensorsError, match="cannot lie beside it"):
            open_safetensors(index)

    @pytest.mark.parametrize(
        "text", ["[" * 100_000, "null", "[]", '{"weight_map": 7}', '{"weight_map": [1]}', '{"weight_map": "x"}']
    )
    def test_no_index(self, tmp_path: Path, text: str) -> None:
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(text)
        with pytest.raises(SafetensorsError, match="not an index of safetensors files"):
            open_safetensors(index)
