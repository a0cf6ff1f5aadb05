"""Programs that are found on disk before JAX traces anything: what their keys are made of, and what is not stored."""

from __future__ import annotations

import dataclasses
import enum
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from xlatrain.step.loss_scale import LossScaler
from xlatrain.step.stacking import StackKey
from xlatrain.xla import kept_files, stored_programs
from xlatrain.xla.compilation_cache import check
from xlatrain.xla.compiler_options import compiler_options
from xlatrain.xla.told import NotToldError, told, told_arguments

_SCRIPT = """
import sys, warnings, jax, jax.numpy as jnp, numpy as np
from xlatrain.xla import compilation_cache
from xlatrain.xla.stored_programs import StoredProgram
compilation_cache.enable()
traced = []
def function(state, x):
    traced.append(1)
    return {"sum": state["sum"] + x}, [x * 2]
def called_back(state, x):
    return state, jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
def solved(state, x):
    return state, jnp.linalg.cholesky(jnp.eye(3) * x.sum())
function = {"function": function, "called_back": called_back, "solved": solved}[sys.argv[1]]
program = StoredProgram(jax.jit(function, donate_argnums=0), lambda: sys.argv[1])
x = jnp.arange(3.0)
if len(jax.devices()) > 1:  # on some of them, in another order
    mesh = jax.sharding.Mesh(np.array(jax.devices())[[2, 1, 3]], ("data",))
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    program.prepare({"sum": x + 1}, x)
loaded = program._loaded is not None
state, out = program({"sum": x + 1}, x)
given = state["sum"]
state, _ = program(state, x)
before = len(traced)
longer, _ = program({"sum": jnp.arange(4.0)}, jnp.arange(4.0))  # arguments of another form
again, _ = program({"sum": x + 1}, x)
print(loaded, before, state["sum"] if "sum" in state else None, len(longer["sum"]), again["sum"], given.is_deleted(),
      sum("is of no use" in str(one.message) for one in told), sep="|")
"""


def run(folder: Path, function: str = "function", **environment: str) -> list[str]:
    chosen_by_the_suite = (
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
        "JAX_ENABLE_COMPILATION_CACHE",
    )
    env = {name: value for name, value in os.environ.items() if name not in chosen_by_the_suite}
    env |= {"XLATRAIN_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", _SCRIPT, function]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1].split("|")


def stored(folder: Path) -> list[Path]:
    return list(folder.glob("xlatrain-program-*"))


def test_a_second_process_traces_nothing(tmp_path: Path) -> None:
    results = ["[1. 4. 7.]", "4", "[1. 3. 5.]", "True"]
    assert run(tmp_path) == ["False", "1", *results, "0"]
    assert run(tmp_path) == ["True", "0", *results, "0"]
    assert run(tmp_path, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=false")[0] == "False"
    for path in stored(tmp_path):
        path.write_bytes(path.read_bytes()[:-1])
    assert run(tmp_path) == ["False", "1", *results, "1"]  # damaged: told, and written anew
    assert run(tmp_path) == ["True", "0", *results, "0"]
    for path in tmp_path.glob("jit_*-cache"):
        path.unlink()  # JAX's cache has let go of the code
    assert run(tmp_path) == ["False", "1", *results, "0"]
    assert run(tmp_path) == ["True", "0", *results, "0"]


def test_programs_on_some_of_the_devices(tmp_path: Path) -> None:
    results = ["[1. 4. 7.]", "4", "[1. 3. 5.]", "True", "0"]
    four = {"JAX_NUM_CPU_DEVICES": "4", "XLA_FLAGS": ""}
    assert run(tmp_path, **four) == ["False", "1", *results]
    assert run(tmp_path, **four) == ["True", "0", *results]
    assert run(tmp_path, JAX_NUM_CPU_DEVICES="5", XLA_FLAGS="")[0] == "False"


@pytest.mark.parametrize("function", ["called_back", "solved"])
def test_programs_that_need_this_process_are_not_stored(tmp_path: Path, function: str) -> None:
    script = "\n".join(_SCRIPT.split("loaded = ")[0].splitlines()) + "\nprint(program._loaded)"
    env = {**os.environ, "XLATRAIN_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "true"}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-c", script, function]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "None"
    assert not stored(tmp_path)


def test_each_part_of_the_key_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.zeros((2, 3))
    devices = np.array(jax.devices("cpu"))
    mesh = Mesh(devices[:1], ("data",))
    arguments: list[Any] = [
        ({"a": x},),
        ({"b": x},),
        ({"a": x, "b": x},),
        ([x],),
        ({"a": jnp.zeros((3, 2))},),
        ({"a": x.astype(jnp.bfloat16)},),
        ({"a": np.zeros((2, 3), np.float32)},),
        ({"a": 1.0},),
        ({"a": 1},),
        ({"a": jnp.asarray(1.0)},),
        ({"a": jax.device_put(x, SingleDeviceSharding(devices[0]))},),
        ({"a": jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))},),
        ({"a": jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "data")))},),
        ({"a": jax.device_put(x, NamedSharding(Mesh(devices[:1], ("fsdp",)), PartitionSpec("fsdp")))},),
    ]
    keys = [stored_programs._whole_key(lambda: "text", one) for one in arguments]
    keys.append(stored_programs._whole_key(lambda: "other text", arguments[0]))
    for name, value in (("jax_default_matmul_precision", "bfloat16"), ("jax_threefry_partitionable", False)):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        keys.append(stored_programs._whole_key(lambda: "text", arguments[0]))
        jax.config.update(name, before)
    for name, value in (("XLA_FLAGS", "--a"), ("JAX_THING", "1")):
        with monkeypatch.context() as here:
            here.setenv(name, value)
            keys.append(stored_programs._whole_key(lambda: "text", arguments[0]))
    with monkeypatch.context() as here:
        here.setattr(stored_programs, "_machine", lambda: "another processor")
        keys.append(stored_programs._whole_key(lambda: "text", arguments[0]))
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert stored_programs._whole_key(lambda: "text", arguments[0]) == keys[0]
    with monkeypatch.context() as here:  # what is no part of a program
        here.setenv("XLATRAIN_REPORT", "/somewhere/else")
        here.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere/else")
        assert stored_programs._whole_key(lambda: "text", arguments[0]) == keys[0]


def test_programs_are_stored_where_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
    monkeypatch.setattr(kept_files, "_folder", None)
    assert not stored_programs.may_be_stored(mesh)
    monkeypatch.setattr(kept_files, "_folder", tmp_path)
    assert stored_programs.may_be_stored(mesh)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not stored_programs.may_be_stored(mesh)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Theirs:
    number: int


def test_what_is_told() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
    values: list[Any] = [
        *(None, True, 1, 1.0, "1", b"1", (1,), [1], {"1": 1}, {1: 1}, frozenset({1}), -0.0, 0.0, float("nan"), 1j),
        *(LossScaler(), LossScaler(init_scale=2.0), StackKey(("a", "b")), StackKey(("a", "c", "b")), "a … b"),
        *(mesh, NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data")), PartitionSpec("data")),
        *(np.dtype("float32"), np.dtype("float64"), kept_files.key_of, kept_files.read, jax.tree.structure((1, 2))),
    ]
    texts = [told(one) for one in values]
    assert len(set(texts)) == len(texts)
    made: list[Any] = []
    for one in (Colour.RED, Theirs(1), object(), lambda: made, np.zeros(2), Theirs):
        with pytest.raises(NotToldError):
            told((1, one))
    with pytest.raises(NotToldError):
        told_arguments(("text",))


def test_a_program_is_checked_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With options of the compiler, which JAX takes of no program inside of another."""
    monkeypatch.setattr(kept_files, "_folder", tmp_path)
    options = compiler_options(Mesh(np.array(jax.devices()[:1]), ("data",)))
    assert options
    program = stored_programs.StoredProgram(jax.jit(lambda x: x + 1, compiler_options=options), lambda: "checked")
    check(program, jnp.ones(3))
    assert program(jnp.ones(3)).tolist() == [2, 2, 2]

    def refused(x: jax.Array) -> jax.Array:
        raise ValueError("no such op")

    with pytest.raises(ValueError, match="no such op"):
        check(stored_programs.StoredProgram(jax.jit(refused, compiler_options=options), lambda: "refused"), jnp.ones(3))
