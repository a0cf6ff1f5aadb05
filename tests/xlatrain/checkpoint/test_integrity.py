"""Checksums: every flipped byte is found, its file and its array are named, and no restore gives wrong values."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from xlatrain import checkpoint
from xlatrain.mesh.mesh import make_mesh


@pytest.fixture
def saved(tmp_path) -> Path:
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    rng = np.random.default_rng(0)
    arrays = {
        f"w{i}": jax.device_put(rng.standard_normal((64, 128)).astype(np.float32), NamedSharding(mesh, PartitionSpec("fsdp")))
        for i in range(3)
    } | {"key": jax.random.key(3), "host": rng.standard_normal(5), "none": np.zeros((0, 3))}
    checkpoint.save(tmp_path / "a.ckpt", arrays, {"note": b"some host state"}, wait=True)
    return tmp_path / "a.ckpt"


def payload_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_an_intact_checkpoint(saved):
    found = checkpoint.verify(saved)
    assert found.intact and not found.foreign
    found.raise_if_damaged()
    assert found.bytes_read > 3 * 64 * 128


def test_every_flipped_byte_is_found(saved):
    opened = checkpoint.open_checkpoint(saved)
    whole = opened.restore_numpy()
    rng, named, files = np.random.default_rng(0), set(), set()
    for file in payload_files(saved):
        data = file.read_bytes()
        for position in (0, len(data) - 1, *rng.integers(len(data), size=4)):
            file.write_bytes(data[:position] + bytes([data[position] ^ (1 << int(rng.integers(8)))]) + data[position + 1 :])
            try:
                found = checkpoint.verify(saved)
            except (checkpoint.CorruptCheckpointError, checkpoint.ForeignPathError) as error:
                assert file.name in ("CURRENT", "manifest.json"), error
                continue
            assert not found.intact, file
            if not found.arrays:  # what a save replaced while it merged the indexes of the processes: nothing reads it
                assert all(np.array_equal(value, whole[name]) for name, value in opened.restore_numpy().items())
            assert list(found.files) == [str(file.relative_to(next(saved.glob("payload-*"))))]
            files |= set(found.files)
            named |= set(found.arrays)
            if found.arrays:
                with pytest.raises(checkpoint.CorruptCheckpointError, match=r"the array '|an index of the|_METADATA differs"):
                    checkpoint.open_checkpoint(saved).restore_numpy(list(found.arrays))
        file.write_bytes(data)
    assert {"w0", "w1", "w2", "key", "host"} <= named
    assert {name.split("/")[1] for name in files} >= {"_METADATA", "manifest.ocdbt", "d", "ocdbt.process_0", "note"}
    assert checkpoint.verify(saved).intact


def test_damage_of_many_arrays_is_one_error_and_nothing_else_is_printed(tmp_path, monkeypatch):
    sharding = NamedSharding(make_mesh({"fsdp": 8}), PartitionSpec("fsdp"))
    value = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    arrays = {f"w{i}": jax.device_put(value + i, sharding) for i in range(12)}
    checkpoint.save(tmp_path / "a.ckpt", arrays, wait=True)
    for file in payload_files(tmp_path / "a.ckpt"):
        if file.stat().st_size > 20_000:
            data = np.frombuffer(file.read_bytes(), np.uint8).copy()
            data[5000::10_000] ^= 0xFF
            file.write_bytes(data.tobytes())
    opened, printed = checkpoint.open_checkpoint(tmp_path / "a.ckpt"), []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: printed.append(str(what.exc_value)))  # by TensorStore's threads
    for read in [lambda: opened.restore(arrays), opened.restore_numpy] * 3:
        with pytest.raises(checkpoint.CorruptCheckpointError, match=r"the array 'w\d+' cannot be read"):
            read()
    assert len(checkpoint.verify(tmp_path / "a.ckpt").arrays) == 12
    assert printed == []


def test_truncated_missing_and_foreign(saved):
    largest = max(payload_files(saved), key=lambda file: file.stat().st_size)
    (saved / "notes.txt").write_text("mine")
    assert checkpoint.verify(saved).foreign == ("notes.txt",)
    data = largest.read_bytes()
    largest.write_bytes(data[:-7])
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match=rf"{largest.name}: expected {len(data)} bytes, found {len(data) - 7}"
    ):
        checkpoint.verify(saved).raise_if_damaged()
    largest.unlink()
    found = checkpoint.verify(saved)
    assert list(found.files.values()) == ["missing"] and set(found.arrays) & {"w0", "w1", "w2"}
    (saved.parent / "other").mkdir()
    (saved.parent / "other" / "file").touch()
    with pytest.raises(checkpoint.ForeignPathError, match="not a checkpoint directory"):
        checkpoint.verify(saved.parent / "other")


def test_restore_on_another_mesh_names_and_dtypes(saved):
    mesh = make_mesh({"fsdp": 2, "tensor": 4})

    def asked(dtype, *spec):
        return jax.ShapeDtypeStruct((64, 128), dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    opened = checkpoint.open_checkpoint(saved)
    whole = opened.restore_numpy(["w0", "w1"])
    template = {"a": asked(np.float32, "tensor"), "twin": asked(np.float32), "half": asked(jnp.bfloat16, None, "fsdp")}
    names = {"a": "w0", "twin": "w0", "half": "w1"}
    restored = opened.restore(template, subset=True, cast=True, stored_as=names.__getitem__)
    np.testing.assert_array_equal(restored["a"], whole["w0"])
    np.testing.assert_array_equal(restored["twin"], whole["w0"])
    np.testing.assert_array_equal(restored["half"], whole["w1"].astype(jnp.bfloat16))
    assert restored["half"].sharding == template["half"].sharding

    assert opened.matching("w[01]", "k*") == ["key", "w0", "w1"]
    with pytest.raises(checkpoint.CheckpointMismatchError, match=r"no arrays match 'v\*'; stored are host, key"):
        opened.matching("w*", "v*")
    with pytest.raises(checkpoint.CheckpointMismatchError) as caught:
        opened.restore({"x": asked(np.int32), "y": asked(np.float32)}, stored_as={"x": "w2", "y": "gone"}.__getitem__)
    for text in ("y (stored as gone)", "x (stored as w2): expected dtype int32", "not asked for: host, key, none, w0, w1"):
        assert text in str(caught.value)


def test_a_pointer_of_before_its_digest_is_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a.ckpt", {"w": np.ones(3)}, wait=True)
    pointer = tmp_path / "a.ckpt" / "CURRENT"
    fields = json.loads(pointer.read_bytes())
    digest = fields.pop("sha256")
    pointer.write_text(json.dumps(fields))
    checkpoint.verify(tmp_path / "a.ckpt")
    for changed in ({**fields, "sha256": None}, {**fields, "sha2_6": digest}, {**fields, "sha256": digest[:-1] + "x"}):
        pointer.write_text(json.dumps(changed))
        with pytest.raises(checkpoint.CorruptCheckpointError, match="CURRENT is not a commit record"):
            checkpoint.verify(tmp_path / "a.ckpt")
