"""Page faults of a program with large temporaries, each case in a process of its own: the settings are the process's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xlatrain.host import malloc

_SCRIPT = """
import ctypes, resource, statistics, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: where the kernel gives huge pages to all, one fault is of 2 MiB
import jax
from xlatrain.host import malloc
print(malloc.keep_freed())
import jax.numpy as jnp
from xlatrain.xla.compilation_cache import block_of, first_run

@jax.jit
def program(x):  # the first product is a temporary of 64 MiB; a reduction of it would be fused by JAX 0.11
    return (x @ x.T) @ x

x = jnp.ones((4096, 64), jnp.float32)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

start = resident()
first_run(program, x).block_until_ready()
runs = []
for _ in range(24):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    program(x).block_until_ready()
    runs.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(statistics.median(runs[4:])) * resource.getpagesize() >> 20)

if block := block_of(program):
    kept = []
    for _ in range(24):
        result = program(x)
        block.settle()
        result.block_until_ready()
        kept.append([bytes(1000 + 7 * size) for size in range(200)])  # cut out of the block, which is free now
    print(resident() - start - len(kept) * sum(map(len, kept[0])) >> 20)
else:
    print(0)

y = jnp.ones((4096, 4096), jnp.float32).block_until_ready()
del y
before = resident()
malloc.give_back_freed()
print(before - resident() >> 20)
"""


def run(**environment: str) -> tuple[str, int, int, int]:
    """Whether freed memory is kept, and MiB: that most runs faulted in, that all have left, given back after 64 were freed.

    Most, not all: a small block may be cut out of the freed one, which then is too small. That happens a few times in a process's
    life, at any of its runs (``benchmarks/notes/speed_on_cpu.md``).
    """
    kept, faulted, grown, given_back = printed([sys.executable, "-c", _SCRIPT], **environment).split()
    return kept, int(faulted), int(grown), int(given_back)


def printed(command: list[str], **environment: str) -> str:
    """By processes whose environment says nothing of allocators and devices but this."""
    ours = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "XLA_FLAGS", "JAX_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=env | environment, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the C library has no mallopt")
def test_temporaries_of_a_program_are_faulted_in_once() -> None:
    kept, faulted, grown, given_back = run(XLATRAIN_HOST_MEMORY="8e9")  # whatever else this machine runs now
    assert kept == "True"
    assert faulted < 8
    assert grown < 3 * 64, "blocks that a program does not use are kept"  # without settle() it was 300 and more
    assert given_back >= 60


@pytest.mark.skipif(sys.platform != "linux", reason="the C library has no mallopt")
def test_temporaries_that_would_fill_the_memory_are_not_kept() -> None:
    kept, faulted, _, _ = run(XLATRAIN_HOST_MEMORY="3e8")
    assert kept == "True"
    assert faulted >= 32


_ASKED = """
from xlatrain.cluster import distributed
from xlatrain.host import malloc
distributed.initialize()
print("kept", malloc.keep_freed())
"""


@pytest.mark.parametrize("how", [{"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, {"JAX_NUM_CPU_DEVICES": "2"}])
def test_a_mesh_keeps_nothing(how: dict[str, str]) -> None:
    assert "kept False" in printed([sys.executable, "-c", _ASKED], **how)


def test_a_mesh_of_processes_with_a_device_each_keeps_nothing(tmp_path: Path) -> None:
    script = tmp_path / "asked.py"
    script.write_text(_ASKED)
    launch = [sys.executable, "-m", "xlatrain.cli", "launch", "--processes", "2", "--devices-per-process", "1"]
    assert printed([*launch, str(script)]).count("kept False") == 2


def test_the_users_own_allocator_settings_stay() -> None:
    kept, faulted, _, _ = run(MALLOC_TOP_PAD_="131072")
    assert kept == "False"
    assert faulted >= 32, "XLA no longer asks the kernel for its temporaries in each run: delete xlatrain/host/malloc.py"


@pytest.mark.parametrize(
    ("environment", "decided"),
    [
        ({"HOME": "/root", "GLIBC_TUNABLES": "glibc.cpu.x86_ibt=on"}, False),
        ({"MALLOC_ARENA_MAX": "4"}, True),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, True),
        ({"LD_PRELOAD": "libjemalloc.so.2"}, True),
    ],
)
def test_who_decides(environment: dict[str, str], decided: bool) -> None:
    assert malloc.decided_by_user(environment) is decided
