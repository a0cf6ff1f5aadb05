"""Round trips in one process: names, dtypes, shardings, files, asynchronous saves and donation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlatrain import checkpoint
from xlatrain.mesh.mesh import make_mesh


def sharded(value, mesh: Mesh, *spec) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


def template(shape, dtype, mesh: Mesh, *spec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def test_restores_exactly_onto_another_mesh(tmp_path):
    values = np.random.default_rng(0).standard_normal((48, 24)).astype(np.float32)
    saved_on, restored_on = make_mesh({"data": 2, "fsdp": 4}), make_mesh({"fsdp": 2, "tensor": 4})
    arrays = {"params": {"fc.weight": sharded(values, saved_on, "fsdp", "data")}, "opt": [sharded(values, saved_on)]}
    checkpoint.save(tmp_path / "a.ckpt", arrays, {"host.json": b"{}"}, wait=True)

    asked = {
        "params": {"fc.weight": template((48, 24), jnp.float32, restored_on, "tensor", "fsdp")},
        "opt": [template((48, 24), jnp.float32, restored_on, None, ("fsdp", "tensor"))],
    }
    opened = checkpoint.open_checkpoint(tmp_path / "a.ckpt")
    restored = opened.restore(asked)

    assert dict(opened.files) == {"host.json": b"{}"}
    assert restored["params"]["fc.weight"].sharding == asked["params"]["fc.weight"].sharding
    np.testing.assert_array_equal(restored["params"]["fc.weight"], values)
    np.testing.assert_array_equal(restored["opt"][0], values)


DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "int8", "uint8", "int32", "bool", "complex64"]


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 1, 2)])
def test_every_dtype_and_shape(tmp_path, shape):
    mesh = make_mesh({"data": 8})
    arrays = {dtype: sharded(jnp.ones(shape, dtype), mesh) for dtype in DTYPES}
    checkpoint.save(tmp_path / "a.ckpt", arrays, wait=True)

    opened = checkpoint.open_checkpoint(tmp_path / "a.ckpt")
    restored = opened.restore({dtype: template(shape, dtype, mesh) for dtype in DTYPES})
    whole = opened.restore_numpy()

    assert {name: (entry.shape, entry.dtype) for name, entry in opened.array_metadata().items()} == {
        dtype: (shape, dtype) for dtype in DTYPES
    }
    for dtype in DTYPES:
        assert restored[dtype].dtype == dtype and whole[dtype].dtype == dtype
        np.testing.assert_array_equal(np.asarray(restored[dtype]), np.ones(shape, dtype))
        np.testing.assert_array_equal(whole[dtype], np.ones(shape, dtype))


def test_int64_from_numpy_comes_back_as_numpy(tmp_path):
    checkpoint.save(tmp_path / "a.ckpt", {"n": np.array([2**40, -1])}, wait=True)
    assert checkpoint.open_checkpoint(tmp_path / "a.ckpt").restore_numpy()["n"].tolist() == [2**40, -1]


def test_odd_names(tmp_path):
    names = ["a.b/c", "ü[0]", "with space", "a:b|c*?", "..", "x" * 300]
    checkpoint.save(tmp_path / "a.ckpt", {name: np.full(3, i) for i, name in enumerate(names)}, wait=True)
    whole = checkpoint.open_checkpoint(tmp_path / "a.ckpt").restore_numpy()
    assert {name: value.tolist() for name, value in whole.items()} == {name: [i] * 3 for i, name in enumerate(names)}


def test_typed_keys(tmp_path):
    mesh = make_mesh({"data": 8})
    keys = jax.device_put(jax.random.split(jax.random.key(7), 16), NamedSharding(mesh, PartitionSpec("data")))
    checkpoint.save(tmp_path / "a.ckpt", {"keys": keys}, wait=True)
    restored = checkpoint.open_checkpoint(tmp_path / "a.ckpt").restore({"keys": template((16,), keys.dtype, mesh, "data")})
    assert restored["keys"].dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(restored["keys"]), jax.random.key_data(keys))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_plain_orbax_reads_the_arrays(tmp_path):
    mesh = make_mesh({"data": 8})
    values = np.arange(16.0, dtype=np.float32)
    checkpoint.save(tmp_path / "a.ckpt", {"params": {"w": sharded(values, mesh, "data")}, "n": np.array(3)}, wait=True)
    (payload,) = (tmp_path / "a.ckpt").glob("payload-*")
    with ocp.PyTreeCheckpointer() as orbax:
        read = orbax.restore(payload / "arrays")
    assert read.keys() == {"params/w", "n"} and read["n"] == 3
    np.testing.assert_array_equal(read["params/w"], values)


def test_no_arrays(tmp_path):
    checkpoint.save(tmp_path / "a.ckpt", {}, {"host": b"x"}, wait=True)
    opened = checkpoint.open_checkpoint(tmp_path / "a.ckpt")
    assert opened.restore({}) == {} and opened.files["host"] == b"x"


@pytest.mark.parametrize("n_devices", [1, 8])
def test_state_may_be_donated_and_numpy_changed_as_soon_as_save_returns(tmp_path, n_devices):
    mesh = make_mesh({"data": n_devices}, devices=jax.devices()[:n_devices])
    values = np.random.default_rng(0).standard_normal((1024, 512)).astype(np.float32)
    state = {f"w{i}": sharded(values + i, mesh, *(["data"] if i % 2 else [])) for i in range(6)}
    state = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 0, tree))(state)  # XLA's own buffers, which it may reuse
    host = np.arange(10)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    step.lower(state).compile()

    pending = checkpoint.save(tmp_path / "a.ckpt", {**state, "host": host})
    host[:] = -1
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    pending.wait()

    assert pending.done()
    whole = checkpoint.open_checkpoint(tmp_path / "a.ckpt").restore_numpy()
    np.testing.assert_array_equal(whole["host"], np.arange(10))
    for i in range(6):
        np.testing.assert_array_equal(whole[f"w{i}"], values + i)


def test_saves_commit_in_order(tmp_path):
    pendings = [checkpoint.save(tmp_path / "a.ckpt", {"x": np.full(3, i)}) for i in range(4)]
    pendings[-1].wait()
    assert all(pending.done() for pending in pendings)
    assert checkpoint.open_checkpoint(tmp_path / "a.ckpt").restore_numpy()["x"].tolist() == [3, 3, 3]
    assert len(list((tmp_path / "a.ckpt").iterdir())) == 2  # the pointer and one payload


def test_relative_path_is_that_of_the_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pending = checkpoint.save("run/a.ckpt", {"x": np.zeros(3)})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pending.wait()
    assert checkpoint.is_checkpoint(tmp_path / "run" / "a.ckpt")


class TestTemplates:
    @pytest.fixture
    def opened(self, tmp_path):
        checkpoint.save(tmp_path / "a.ckpt", {"a": np.ones((4, 2), np.float32), "b": np.ones(3, np.int32)}, wait=True)
        return checkpoint.open_checkpoint(tmp_path / "a.ckpt")

    def test_one_error_lists_everything(self, opened):
        mesh = make_mesh({"data": 8})
        asked = {"a": template((4, 3), jnp.bfloat16, mesh), "c": template((1,), jnp.int32, mesh)}
        with pytest.raises(checkpoint.CheckpointMismatchError) as caught:
            opened.restore(asked)
        text = str(caught.value)
        assert "asked for, but not in the checkpoint: c" in text
        assert "in the checkpoint, but not asked for: b" in text
        assert "a: expected shape (4, 3), stored (4, 2)" in text
        assert "a: expected dtype bfloat16, stored float32" in text

    def test_subset_and_cast(self, opened):
        restored = opened.restore({"a": template((4, 2), jnp.bfloat16, make_mesh({"data": 8}))}, subset=True, cast=True)
        assert restored["a"].dtype == jnp.bfloat16 and bool((restored["a"] == 1).all())

    def test_leaf_without_sharding(self, opened):
        with pytest.raises(ValueError, match=r"template\['a'\] has no sharding"):
            opened.restore({"a": jax.ShapeDtypeStruct((4, 2), jnp.float32)})

    def test_dtype_that_jax_lacks(self, opened):
        mesh = make_mesh({"data": 8})
        with pytest.raises(ValueError, match="jax_enable_x64"):
            opened.restore({"b": template((3,), np.int64, mesh)}, subset=True, cast=True)

    def test_unknown_name(self, opened):
        with pytest.raises(checkpoint.CheckpointMismatchError, match="no arrays named z; stored are a, b"):
            opened.restore_numpy(["z"])


class TestBadArguments:
    @pytest.mark.parametrize(
        ("arrays", "error", "message"),
        [
            ({"step": 3}, TypeError, r"arrays\['step'\] is int"),
            ({"o": np.array([object()])}, TypeError, "Python objects"),
            ({"a/b": np.ones(1), "a": {"b": np.ones(1)}}, ValueError, "same name 'a/b'"),
            (np.ones(2), ValueError, "single array"),
        ],
    )
    def test_arrays(self, tmp_path, arrays, error, message):
        with pytest.raises(error, match=message):
            checkpoint.save(tmp_path / "a.ckpt", arrays)
        assert not checkpoint.is_checkpoint(tmp_path / "a.ckpt")

    def test_deleted_array(self, tmp_path):
        array = jnp.ones(3)
        array.delete()
        with pytest.raises(ValueError, match=r"arrays\['w'\] was deleted"):
            checkpoint.save(tmp_path / "a.ckpt", {"w": array})

    def test_file_names_and_contents(self, tmp_path):
        with pytest.raises(ValueError, match=r"files\['../x'\]"):
            checkpoint.save(tmp_path / "a.ckpt", {}, {"../x": b""})
        with pytest.raises(TypeError, match=r"files\['x'\] is str"):
            checkpoint.save(tmp_path / "a.ckpt", {}, {"x": "text"})


def test_urls(tmp_path):
    checkpoint.save(f"file://{tmp_path}/a.ckpt", {"w": np.ones(3)}, wait=True)
    assert checkpoint.is_checkpoint(tmp_path / "a.ckpt") and checkpoint.verify(f"file://{tmp_path}/a.ckpt").intact
    for url in ("memory://a.ckpt", "az://bucket/a.ckpt"):
        assert not checkpoint.is_checkpoint(url) and not checkpoint.is_checkpoint_directory(url)
        with pytest.raises(ValueError, match=r"written to directories, gs:// and s3://; for other storage"):
            checkpoint.save(url, {"w": np.ones(3)})
