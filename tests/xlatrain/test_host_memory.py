"""Page faults of a program with large temporaries, each case in a process of its own: the settings are the process's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from xlatrain import host_memory

_SCRIPT = """
import resource, sys
import jax
from xlatrain import host_memory
print(host_memory.keep_freed())
import jax.numpy as jnp

@jax.jit
def program(x):  # the product is a temporary of 64 MiB
    return (x @ x.T).max(0)

x = jnp.ones((4096, 64), jnp.float32)
runs = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    program(x).block_until_ready()
    runs.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(runs[-1] * resource.getpagesize() >> 20)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

y = jnp.ones((4096, 4096), jnp.float32).block_until_ready()
del y
before = resident()
host_memory.give_back_freed()
print(before - resident())
"""


def run(**environment: str) -> tuple[str, int, int]:
    """Whether freed memory is kept, the MiB that the fourth run faulted in, those given back after 64 were freed."""
    ours = ("MALLOC_", "XLA_FLAGS", "JAX_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=env | environment, capture_output=True, text=True, timeout=120, check=True
    )
    kept, faulted, given_back = done.stdout.split()
    return kept, int(faulted), int(given_back)


@pytest.mark.skipif(sys.platform != "linux", reason="the C library has no mallopt")
def test_temporaries_of_a_program_are_faulted_in_once() -> None:
    kept, faulted, given_back = run()
    assert kept == "True"
    assert faulted < 8
    assert given_back >= 60


@pytest.mark.parametrize("how", [{"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, {"JAX_NUM_CPU_DEVICES": "2"}])
def test_a_mesh_keeps_nothing(how: dict[str, str]) -> None:
    assert run(**how)[0] == "False"


def test_the_users_own_allocator_settings_stay() -> None:
    kept, faulted, _ = run(MALLOC_TOP_PAD_="131072")
    assert kept == "False"
    assert faulted >= 32, "XLA no longer asks the kernel for its temporaries in each run: delete xlatrain/host_memory.py"


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
    assert host_memory.decided_by_user(environment) is decided
