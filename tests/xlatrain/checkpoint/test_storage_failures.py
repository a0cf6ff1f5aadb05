"""A disk that is full, a directory that may not be written: a clear error, and what was committed before stays."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from xlatrain import checkpoint


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Make writes beyond ``size`` bytes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [300, 1000, 100_000])
def test_no_space_for_arrays_or_for_what_comes_after_them(tmp_path, limit):
    path = tmp_path / "a.ckpt"
    state = {"w": jax.numpy.asarray(np.random.default_rng(0).standard_normal((512, 512)), "float32")}
    changed = {"w": state["w"] + 1}  # here, since JAX would keep a torn program where the file ends
    checkpoint.save(path, state, {"host": b"1"}, wait=True)
    with files_end_at(limit):
        pending = checkpoint.save(path, changed, {"host": b"2"})
        with pytest.raises(checkpoint.CheckpointError, match=r"saving .*a\.ckpt failed") as failed:
            pending.wait()
    assert "File too large (free space" in str(failed.value) and len(str(failed.value)) < 800
    opened = checkpoint.open_checkpoint(path)
    assert checkpoint.verify(path).intact and opened.files["host"] == b"1"
    np.testing.assert_array_equal(opened.restore_numpy()["w"], state["w"])
    checkpoint.save(path, changed, {"host": b"2"}, wait=True)  # there is space again
    assert checkpoint.open_checkpoint(path).files["host"] == b"2"
    assert len(list(path.iterdir())) == 2  # nothing is left of the failed one


def test_what_cannot_be_kept_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match=r"facts=\{'best': .*as JSON has them"):
        checkpoint.save(tmp_path / "a.ckpt", {"w": np.ones(3)}, facts={"best": np.float32(1)})
    assert not list(tmp_path.iterdir())


def test_left_overs_of_killed_saves_are_removed_when_a_run_starts(tmp_path):
    checkpoint.save(tmp_path / "whole.ckpt", {"w": np.ones(3)}, wait=True)
    left = [tmp_path / name / f"payload-{'0' * 31}{index}" for index, name in enumerate(("whole.ckpt", "torn.ckpt", "now.ckpt"))]
    for payload in left:
        (payload / "arrays").mkdir(parents=True)
        (payload / "arrays" / "part").write_bytes(b"half")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine.txt").touch()
    (tmp_path / "empty").mkdir()
    old = time.time() - 4000
    for payload in left[:2]:
        for entry in (*payload.rglob("*"), payload):
            os.utime(entry, (old, old))
    assert set(checkpoint.clean(tmp_path)) == set(left[:2])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "logs", "now.ckpt", "whole.ckpt"]
    assert checkpoint.verify(tmp_path / "whole.ckpt").intact
    assert set(checkpoint.clean(tmp_path, older_than_s=0)) == {left[2]}
    assert not (Path(tmp_path) / "now.ckpt").exists()
