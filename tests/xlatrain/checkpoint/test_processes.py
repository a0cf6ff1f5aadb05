"""Several processes: each writes its shards, all agree, and any process count restores."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests import compiling, warm
from xlatrain import checkpoint
from xlatrain.cluster.launch import free_port
from xlatrain.mesh.mesh import make_mesh
from xlatrain.step.engine import Engine

pytestmark = pytest.mark.multiprocess

ROOT = Path(checkpoint.__file__).parents[2]
LIMIT_S = 300

PREAMBLE = """
    import sys
    import jax
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from xlatrain import checkpoint
    from xlatrain.mesh import make_mesh
    path, process = sys.argv[3], jax.process_index()
    mesh = make_mesh({"data": 2, "fsdp": 4})

    def spread(values, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    def raised(call):
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    matrix = np.arange(48 * 24, dtype=np.float32).reshape(48, 24)
"""


@contextlib.contextmanager
def started_two(path: Path, program: str) -> Iterator[list[tuple[warm.Child, Path, Path]]]:
    """The processes of a two-process JAX program, with the files of what they write and of their errors; ended at the end."""
    address = f"127.0.0.1:{free_port()}"
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(program)
    environment = compiling.environment()
    forks = warm.server(warm.OURS, environment)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for process in range(2):
            output, errors = Path(folder) / f"output{process}", Path(folder) / f"errors{process}"
            command = ["-c", code, address, str(process), str(path)]
            started.append((forks.start(command, environment, output, errors=errors, folder=ROOT), output, errors))
        try:
            yield started
        finally:
            for child, _, _ in started:
                child.kill()
                child.wait(LIMIT_S)


def two_processes(path: Path, program: str) -> list[str]:
    """Standard output of both processes of a two-process JAX program; an error of either fails the test."""
    with started_two(path, program) as started:
        for child, _, errors in started:
            assert child.wait(LIMIT_S) == 0, errors.read_text()[-3000:]
        return [output.read_text() for _, output, _ in started]


def test_two_by_four_restores_on_one_by_eight(tmp_path):
    program = """
        arrays = {
            "across": spread(matrix, ("data", "fsdp")),
            "inside": spread(matrix, None, "fsdp"),
            "whole": spread(matrix[0]),
            "host": np.full(3, 5 + process),
            "none": spread(matrix[:0]),
        }
        step = jax.jit(lambda x: x * 0, donate_argnums=0)
        pending = checkpoint.save(path, arrays, {"who": str(process).encode()})
        arrays["across"] = step(arrays["across"])
        pending.wait()
        assert checkpoint.is_checkpoint(path)  # committed as seen from every process
        if process == 1:  # reading is local: a lone reader does not hang
            print(checkpoint.open_checkpoint(path).restore_numpy(["host"])["host"].tolist())
    """
    _, second = two_processes(tmp_path / "a.ckpt", program)
    assert second.split("\n")[-2] == "[5, 5, 5]"

    matrix = np.arange(48 * 24, dtype=np.float32).reshape(48, 24)
    mesh = make_mesh({"fsdp": 2, "tensor": 4})

    def asked(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    opened = checkpoint.open_checkpoint(tmp_path / "a.ckpt")
    template = {
        "across": asked((48, 24), jnp.float32, "tensor", "fsdp"),
        "inside": asked((48, 24), jnp.float32),
        "whole": asked((24,), jnp.float32, ("fsdp", "tensor")),
        "none": asked((0, 24), jnp.float32),
    }
    restored = opened.restore(template, subset=True)
    for name in template:
        assert restored[name].sharding.is_equivalent_to(template[name].sharding, len(template[name].shape))
    np.testing.assert_array_equal(restored["across"], matrix)
    np.testing.assert_array_equal(restored["inside"], matrix)
    np.testing.assert_array_equal(restored["whole"], matrix[0])
    assert restored["none"].shape == (0, 24)
    assert opened.files["who"] == b"0"


def test_one_by_eight_restores_on_two_by_four(tmp_path):
    matrix = np.arange(48 * 24, dtype=np.float32).reshape(48, 24)
    sharding = NamedSharding(make_mesh({"fsdp": 8}), PartitionSpec("fsdp"))
    checkpoint.save(tmp_path / "a.ckpt", {"w": jax.device_put(matrix, sharding)}, wait=True)
    program = """
        sharding = NamedSharding(mesh, PartitionSpec("fsdp", "data"))
        template = {"w": jax.ShapeDtypeStruct((48, 24), np.float32, sharding=sharding)}
        restored = checkpoint.open_checkpoint(path).restore(template)["w"]
        for shard in restored.addressable_shards:
            np.testing.assert_array_equal(shard.data, matrix[shard.index])
        print(len(restored.addressable_shards))
    """
    assert [output.split("\n")[-2] for output in two_processes(tmp_path / "a.ckpt", program)] == ["4", "4"]


def test_flax_engine_on_two_processes_resumes_on_one(tmp_path):
    program = """
        import optax
        from flax import nnx
        from xlatrain.step.engine import Engine

        engine = Engine(lambda rngs: nnx.Linear(24, 48, rngs=rngs), optax.adam(1e-2), mesh=mesh)
        step = engine.compile_train_step(lambda model, batch: ((model(batch["x"]) - 1) ** 2).mean())
        state = engine.init()
        x = np.linspace(-1, 1, 16 * 24, dtype=np.float32).reshape(16, 24)
        for _ in range(3):  # the mesh's first 8 rows are process 0's
            state, output = step(state, {"x": x[8 * process : 8 * process + 8]})
        engine.save(path, state, wait=True)
        print(float(output.loss))
    """
    losses = [float(output.split()[-1]) for output in two_processes(tmp_path / "a.ckpt", program)]
    assert losses[0] == losses[1]

    engine = Engine(lambda rngs: nnx.Linear(24, 48, rngs=rngs), optax.adam(1e-2), mesh=make_mesh({"fsdp": 8}))
    step = engine.compile_train_step(lambda model, batch: ((model(batch["x"]) - 1) ** 2).mean())
    x = np.linspace(-1, 1, 16 * 24, dtype=np.float32).reshape(16, 24)
    state = engine.init()
    for _ in range(3):
        state, output = step(state, {"x": x})
    np.testing.assert_allclose(losses[0], float(output.loss), rtol=1e-5)
    restored = engine.restore(tmp_path / "a.ckpt")
    for (key_path, leaf), expected in zip(jax.tree.leaves_with_path(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-6, err_msg=jax.tree_util.keystr(key_path))


def test_errors_are_raised_on_every_process_and_lose_nothing(tmp_path):
    (tmp_path / "foreign.ckpt").write_bytes(b"")
    program = """
        import xlatrain.checkpoint.arrays as arrays_module
        good = {"w": spread(matrix, "fsdp")}
        checkpoint.save(path, good, wait=True)
        print("FILE", raised(lambda: checkpoint.save(path.replace("a.ckpt", "foreign.ckpt"), good)))
        print("LOCAL", raised(lambda: checkpoint.save(path, {"w": jax.numpy.ones(3)})))
        print("ONE", raised(lambda: checkpoint.save(path, good if process == 0 else {"w": 3})))

        # The disk of process 1 fills up while it writes its shards in the background.
        def no_space(self):
            raise OSError(28, "No space left on device")
        pending = checkpoint.save(path, good)
        pending.wait()
        if process == 1:
            arrays_module.ArrayWriter.wait = no_space
        pending = checkpoint.save(path, {"w": spread(matrix + 1, "fsdp")})
        print("DISK", raised(pending.wait))
    """
    outputs = two_processes(tmp_path / "a.ckpt", program)
    said = [dict(line.split(" ", 1) for line in output.splitlines() if line.split(" ")[0].isupper()) for output in outputs]
    for process in range(2):
        assert said[process]["FILE"].startswith("ForeignPathError") and "is a file" in said[process]["FILE"]
        assert said[process]["LOCAL"].startswith("ValueError") and "arrays['w'] is only on process" in said[process]["LOCAL"]
        assert "arrays['w'] is int" in said[process]["ONE"]
        assert "No space left on device" in said[process]["DISK"]
    assert "process 1: TypeError" in said[0]["ONE"]
    matrix = np.arange(48 * 24, dtype=np.float32).reshape(48, 24)
    np.testing.assert_array_equal(checkpoint.open_checkpoint(tmp_path / "a.ckpt").restore_numpy()["w"], matrix)


def test_one_process_killed_mid_save_leaves_the_previous_checkpoint(tmp_path):
    program = """
        import os, signal
        import xlatrain.checkpoint.arrays as arrays_module

        checkpoint.save(path, {"w": spread(matrix, "fsdp")}, wait=True)
        if process == 1:
            arrays_module.ArrayWriter.wait = lambda self: os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.save(path, {"w": spread(matrix + 1, "fsdp")}, wait=True)
    """
    path = tmp_path / "a.ckpt"
    with started_two(path, program) as started:
        assert started[1][0].wait(LIMIT_S) == -signal.SIGKILL
    matrix = np.arange(48 * 24, dtype=np.float32).reshape(48, 24)
    np.testing.assert_array_equal(checkpoint.open_checkpoint(path).restore_numpy()["w"], matrix)
    assert len(list(path.iterdir())) == 3  # the pointer, its payload, and what was begun
    checkpoint.save(path, {"w": matrix + 2}, wait=True)
    np.testing.assert_array_equal(checkpoint.open_checkpoint(path).restore_numpy()["w"], matrix + 2)
    assert len(list(path.iterdir())) == 2


def test_a_directory_that_is_not_shared_is_found(tmp_path):
    for process in range(2):
        (tmp_path / str(process)).mkdir()
    program = """
        mine = f"{path}/{process}"  # what /tmp is on two hosts: the same name, not the same directory
        print("CHECK", raised(lambda: checkpoint.check_shared(path)))
        print("APART", raised(lambda: checkpoint.check_shared(mine)))
    """
    for output in two_processes(tmp_path, program):
        lines = output.splitlines()
        assert "CHECK nothing" in lines
        (apart,) = [line for line in lines if line.startswith("APART")]
        assert "process 1: does not see what process 0 wrote" in apart


def test_processes_that_save_different_things_are_named(tmp_path):
    program = """
        import os, signal

        def broken():
            raise RuntimeError("hook failed")

        good = {"w": spread(matrix, "fsdp")}
        other = {"w": spread(matrix, "fsdp"), "extra": spread(matrix)}
        print("MORE", raised(lambda: checkpoint.save(path, good if process == 0 else other)))
        print("LESS", raised(lambda: checkpoint.save(path, other if process == 0 else good)))
        print("FILES", raised(lambda: checkpoint.save(path, good, broken)))
        print("BAD0", raised(lambda: checkpoint.save(path, {"w": 3} if process == 0 else good)))
        checkpoint.save(path, good, lambda: {"who": str(process).encode()}, wait=True)

        def pressed(times):  # Ctrl-C on process 0, while process 1 waits for it
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            return {"who": b"pressed"}

        for times in (2, 1):
            try:
                checkpoint.save(path, good, lambda: pressed(times))
                print(f"PRESSED{times} nothing")
            except BaseException as error:
                print(f"PRESSED{times} {type(error).__name__}: {error}")
        checkpoint.wait_for_saves()
        print("AFTER", checkpoint.open_checkpoint(path).files["who"])
    """
    outputs = two_processes(tmp_path / "a.ckpt", program)
    said = [dict(line.split(" ", 1) for line in output.splitlines() if line.split(" ")[0].isupper()) for output in outputs]
    assert [one["PRESSED2"] for one in said] == ["KeyboardInterrupt: ", "CheckpointError: process 0: KeyboardInterrupt"]
    assert [one["PRESSED1"] for one in said] == ["KeyboardInterrupt: ", "nothing"]
    assert [one["AFTER"] for one in said] == ["b'pressed'"] * 2
    for process in range(2):
        assert "the arrays on process 1 differ from those on process 0" in said[process]["MORE"]
        assert "the arrays on process 1 differ from those on process 0" in said[process]["LESS"]
        assert "hook failed" in said[process]["FILES"]
        assert said[process]["BAD0"].startswith("TypeError") and "arrays['w'] is int" in said[process]["BAD0"]
    assert len(list((tmp_path / "a.ckpt").iterdir())) == 2
