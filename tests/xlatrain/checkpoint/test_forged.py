"""Checkpoints made by somebody who means harm: names in metadata do not lead out of the directory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from xlatrain import checkpoint
from xlatrain.checkpoint.record import CommitRecord

OUTSIDE = ["files/../../../secret", "../secret", "/etc/passwd", "files/..", "files//x", "..\\secret", "c:/secret", ""]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(b"secret")
    checkpoint.save(tmp_path / "a.ckpt", {"w": np.ones(3)}, {"note": b"1"}, wait=True)
    return tmp_path / "a.ckpt"


def forge(path: Path, name: str) -> None:
    """Name a file in the manifest, and make every digest right."""
    pointer = path / "CURRENT"
    record = json.loads(pointer.read_text())
    manifest = path / record["payload"] / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields["sizes"][name] = 6
    fields["digests"][name] = hashlib.sha256(b"secret").hexdigest()
    manifest.write_text(json.dumps(fields))
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    pointer.write_bytes(CommitRecord(record["payload"], record["committed_ns"], digest).line())


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_out_is_refused(saved: Path, name: str) -> None:
    forge(saved, name)
    for use in (checkpoint.open_checkpoint, checkpoint.verify):
        with pytest.raises(checkpoint.CorruptCheckpointError, match="outside of the checkpoint; do not use it"):
            use(saved)
    copies = checkpoint.DurableCopies(saved.parent)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="outside of the checkpoint"):
        copies.fetch("a.ckpt", saved.parent / "fast")
    assert not [file for file in (saved.parent / "fast").rglob("*") if file.is_file()]


@pytest.mark.parametrize("payload", ["../other", "/etc", "payload-../../x", "payload-" + "0" * 31 + "/", ".", ""])
def test_a_payload_that_leads_out_is_refused(saved: Path, payload: str) -> None:
    pointer = saved / "CURRENT"
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), "payload": payload}))
    for use in (checkpoint.open_checkpoint, checkpoint.verify):
        with pytest.raises(checkpoint.CorruptCheckpointError, match="not a payload of xlatrain"):
            use(saved)
    assert checkpoint.DurableCopies(saved.parent).records() == {}
    assert not checkpoint.is_checkpoint(saved)


def test_host_files_are_plain_names(tmp_path: Path) -> None:
    for name in ("../x", "/x", "a/b", "..", "a\\b", ""):
        with pytest.raises(ValueError, match="expected a plain file name"):
            checkpoint.save(tmp_path / "a.ckpt", {"w": np.ones(3)}, {name: b"1"})
    assert not (tmp_path / "x").exists()
