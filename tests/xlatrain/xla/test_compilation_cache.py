"""Where compiled programs are kept, each case in a process of its own: JAX's configuration is global."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xlatrain.xla.compilation_cache import _bound

_SCRIPT = """
import jax, sys
from xlatrain.xla import compilation_cache
print(compilation_cache.enable())
print(float(jax.jit(lambda x: x * 3)(2.0)))
"""


def run(**environment: str) -> list[str]:
    chosen_by_the_suite = (
        "XLATRAIN_CACHE_DIR",
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    )
    env = {name: value for name, value in os.environ.items() if name not in chosen_by_the_suite} | environment
    done = subprocess.run([sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.split()


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-atime")}


def test_a_program_is_kept_and_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert run(XLATRAIN_CACHE_DIR=str(folder)) == [str(folder), "6.0"]
    kept = entries(folder)
    assert kept
    run(XLATRAIN_CACHE_DIR=str(folder))
    assert entries(folder) == kept


def test_the_user_decides_which_programs_are_kept(tmp_path: Path) -> None:
    run(XLATRAIN_CACHE_DIR=str(tmp_path / "ours"), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="100")
    assert not entries(tmp_path / "ours")


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    for age in range(10):
        path = tmp_path / f"program{age}"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    _bound(tmp_path, 1000)
    assert len(entries(tmp_path)) == 10
    _bound(tmp_path, 800)
    assert entries(tmp_path) == {f"program{age}" for age in range(6)}  # the oldest go, down to three quarters
    _bound(tmp_path / "missing", 1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XLATRAIN_CACHE_DIR": ""}, "None"),
        ({"XDG_CACHE_HOME": "{tmp}"}, "{tmp}/xlatrain/jax"),
        ({"XLATRAIN_CACHE_DIR": "/dev/null/no", "HOME": "{tmp}"}, "None"),
        ({"XLATRAIN_CACHE_DIR": "{tmp}/ours", "JAX_COMPILATION_CACHE_DIR": "{tmp}/theirs"}, "{tmp}/theirs"),
    ],
    ids=["turned off", "user's cache folder", "not writable", "JAX's own setting"],
)
def test_where_it_is(tmp_path: Path, environment: dict[str, str], expected: str) -> None:
    given = {name: value.format(tmp=tmp_path) for name, value in environment.items()}
    assert run(**given)[0] == expected.format(tmp=tmp_path)
