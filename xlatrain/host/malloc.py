"""Host memory that a program of XLA:CPU frees, kept for its next run.

XLA:CPU takes one block for all temporaries of a program from ``malloc``, every time that it runs. glibc gets blocks above 32 MiB
from the kernel and hands them back, so that each step faults in, and the kernel zeroes, all its pages again: a quarter of the
time of a small CNN's step (``benchmarks/notes/speed_on_cpu.md``). Where the mesh has several devices, of one process or of
several, it is not kept: whoever shards a model there is short of memory, and the programs of initialization and of steps need
blocks of other sizes (``benchmarks/notes/memory_on_cpu.md``).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping

import jax
from jax._src import distributed, hardware_utils, xla_bridge

from xlatrain.host.host_memory import available_host_memory

# Parameters of https://man7.org/linux/man-pages/man3/mallopt.3.html. Only the main arena can hold blocks of any size.
_SETTINGS = {
    -8: 1,  # M_ARENA_MAX: the threads of XLA use the main arena
    -4: 0,  # M_MMAP_MAX: no block directly from the kernel
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: up to 2 GiB at the end of the heap are kept
}
_NOT_KEPT = {  # what glibc does with large blocks by itself, whatever was kept before
    -4: 65536,
    -3: 32 << 20,  # M_MMAP_THRESHOLD, in bytes: its largest
    -1: 64 << 20,
}
# Blocks of a program that are kept at most in a bare loop (7 were seen); of those that have a Block two.
_BLOCKS = 6
_LARGE = 32 << 20  # smaller blocks glibc keeps whatever is set
_AMD_GPU = "/dev/kfd"
_kept = False


def keep_freed() -> bool:
    """Have glibc keep freed memory for the next run, where JAX's backend will be the CPU, as one device.

    To be called before JAX starts, whose threads choose their arena when they start, and after this process has joined others,
    if there are any: where there are, the mesh has several devices. Nothing happens where the
    user has settled it (a ``MALLOC_…`` variable, ``glibc.malloc`` in ``GLIBC_TUNABLES``, an ``LD_PRELOAD``), where the C
    library has no such settings, or once JAX has started.

    Returns:
        Whether it was set.
    """
    if xla_bridge.backends_are_initialized() or decided_by_user() or not cpu_comes_first():
        return False
    if cpu_devices() > 1 or distributed.global_state.num_processes > 1:
        return False
    global _kept
    _kept = _set(_SETTINGS)
    return _kept


def keep_no_more_than_fits(temporaries: int) -> None:
    """Keep nothing from now on if this program's temporaries, of so many bytes, would fill the host's memory.

    Several blocks of them stay: XLA takes one for the next run before the last run's is back, and glibc cuts small ones out of a
    free one, which then is too small.
    """
    global _kept
    if _kept and _BLOCKS * temporaries > available_host_memory():
        _kept = not _set(_NOT_KEPT)


class Block:
    """The block of a program's temporaries, which glibc keeps from run to run.

    Small blocks are cut out of it while it is free, and what glibc cuts off at its end to align it goes to others. It is then too
    small for the next run, which gets another one, and stays where it is. While a run has its block, what is free is of no use to
    it: where the heap has grown by a block or more than one is in the host's memory, the kernel gets it.

    Args:
        temporaries: their bytes.
    """

    _end = 0  # of the heap, where it was highest
    _largest = 0
    _others = 0  # bytes in the host's memory but for a block, as far as is known

    def __init__(self, temporaries: int) -> None:
        self._temporaries = temporaries
        Block._largest = max(Block._largest, temporaries)
        Block._others = Block._others or resident()
        self._sbrk = ctypes.CDLL(None).sbrk
        self._sbrk.argtypes, self._sbrk.restype = (ctypes.c_ssize_t,), ctypes.c_size_t
        Block._end = max(Block._end, self._sbrk(0))

    def settle(self) -> None:
        """To be called as soon as a run has begun, before it has touched much of its block."""
        end, now = self._sbrk(0), resident()
        grown = end - Block._end
        Block._end, Block._others = max(Block._end, end), min(Block._others, now)
        if grown > self._temporaries // 2 or now > Block._others + 3 * Block._largest // 2:
            give_back_freed()
            Block._others = max(Block._others, resident() - Block._largest)


def resident() -> int:
    """Bytes of this process that are in the host's memory."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(64).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def block(temporaries: int) -> Block | None:
    """The block of a program's temporaries, of so many bytes, before its first run; None where it is not kept."""
    return Block(temporaries) if _kept and temporaries >= _LARGE else None


def give_back_freed() -> None:
    """Let the kernel have what was freed so far, in small pieces too, which glibc keeps by itself.

    For before what needs other sizes, or most of all: a program's first run, after initialization and after the compiler.
    """
    trim = _of_c_library("malloc_trim")
    if trim is not None:
        trim(0)


def _set(settings: Mapping[int, int]) -> bool:
    mallopt = _of_c_library("mallopt")
    return mallopt is not None and all(mallopt(parameter, value) == 1 for parameter, value in settings.items())


def _of_c_library(name: str) -> Callable[..., int] | None:
    """A function that glibc has, and other C libraries may not have."""
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


def decided_by_user(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment has settings of an allocator."""
    return (
        any(name.startswith("MALLOC_") for name in environment)
        or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
        or bool(environment.get("LD_PRELOAD"))
    )


def cpu_devices(environment: Mapping[str, str] = os.environ) -> int:
    """The number of devices that JAX will make of this process's CPU."""
    asked = int(getattr(jax.config, "jax_num_cpu_devices", -1))
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", ""))
    return asked if asked > 0 else int(forced.group(1)) if forced else 1


def cpu_comes_first() -> bool:
    """Whether the CPU will be JAX's default backend. Starts none."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms:
        return platforms.split(",")[0] == "cpu"
    has_tpu = hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0
    return not (has_tpu or hardware_utils.has_visible_nvidia_gpu() or os.path.exists(_AMD_GPU))
