"""JAX's persistent compilation cache, on by default: a program that was compiled once is loaded in the next process.

JAX keeps what took a second or more to compile, which a small model's programs do not; here all are kept. JAX's own bound
(``jax_compilation_cache_max_size``) takes a lock for each program and fails in a folder that was filled without it. So the folder
is brought below a bound as a process begins to use it.

And the first run of a program, which compiles it, after memory that is no longer needed has been given back; and the others, in
which one with large temporaries takes no second block for them.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from xlatrain.host import malloc
from xlatrain.xla import kept_files

LARGEST = 4 << 30
"""Bytes that the programs in our own folder may take, when a process begins."""
_BLOCKS: weakref.WeakKeyDictionary[Callable[..., Any], malloc.Block] = weakref.WeakKeyDictionary()
_MIN_TIME = "jax_persistent_cache_min_compile_time_secs"
_MIN_TIME_OF_JAX = 1.0


def enable() -> Path | None:
    """Turn the cache on where the user has not decided, before the first program is compiled.

    It is kept in ``XLATRAIN_CACHE_DIR``, or in the user's cache folder; an empty ``XLATRAIN_CACHE_DIR`` turns it off.
    ``JAX_COMPILATION_CACHE_DIR`` and ``jax_compilation_cache_dir`` come first, and which programs are kept there is up to JAX.
    In ours all are, unless ``JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS`` (or the option of that name) says otherwise; of more
    than 4 GiB those go that were not used for longest.

    Returns:
        Where the cache is, or None if it is off.
    """
    if jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return Path(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]
    chosen = os.environ.get("XLATRAIN_CACHE_DIR")
    if chosen == "" or not jax.config.jax_enable_compilation_cache:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    folder = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xlatrain" / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a read-only home: compile every time
    _keep_all()
    _bound(folder, LARGEST)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    kept_files.use(folder)
    return folder


def _keep_all() -> None:
    """Keep programs however fast they were compiled, where the user has not decided."""
    if _MIN_TIME.upper() not in os.environ and getattr(jax.config, _MIN_TIME) == _MIN_TIME_OF_JAX:
        jax.config.update(_MIN_TIME, 0.0)


@contextlib.contextmanager
def nothing_kept(platform: str) -> Iterator[None]:
    """The cache keeps no TPU program that is compiled in the block: JAX cannot load one again for devices that are not here.

    A program for the CPUs of this machine is kept: preflight compiles it, and a run of the same step finds it.

    Args:
        platform: of the devices that programs are compiled for, ``"cpu"`` or ``"tpu"``.
    """
    if platform == "cpu":
        yield
        return
    before = getattr(jax.config, _MIN_TIME)
    jax.config.update(_MIN_TIME, float("inf"))
    try:
        yield
    finally:
        jax.config.update(_MIN_TIME, before)


def _bound(folder: Path, largest: int) -> None:
    """Delete the programs of a folder that were not used for longest, where it has more than ``largest`` bytes."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        found = [(stat.st_size, max(stat.st_atime, stat.st_mtime), entry.path) for entry in entries if (stat := _stat(entry))]
        excess = sum(size for size, _, _ in found) - largest
        if excess <= 0:
            return
        for size, _, path in sorted(found, key=lambda one: one[1]):
            if excess <= -largest // 4:  # so that the next processes have nothing to do
                return
            with contextlib.suppress(OSError):  # another process is at it
                os.unlink(path)
                excess -= size


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """The file's facts; None of what is no file, or is gone."""
    with contextlib.suppress(OSError):
        return entry.stat() if entry.is_file() else None
    return None


def check(program: Callable[..., Any], *args: Any) -> None:
    """Raise what its first run with arguments like these would raise before it is compiled: errors of its lowering.

    Args:
        program: jitted.
    """
    find = getattr(program, "find", None)  # of a StoredProgram
    if find is None or not find(*args):
        program.eval_shape(*args)  # what this traces the first run does not trace again


def first_run(program: Callable[..., Any], *args: Any) -> Any:
    """``program(*args)``.

    Args:
        program: jitted, or compiled already.
        args: they may still be on their way onto the devices.
    """
    jax.block_until_ready(args)
    malloc.give_back_freed()  # memory that initialization and the capture needed is of no use to the program
    if hasattr(program, "lower"):
        prepare = getattr(program, "prepare", None)  # of a StoredProgram
        compiled = prepare(*args) if prepare is not None else program.lower(*args).compile()  # the call below finds it compiled
        stats = compiled.memory_analysis()  # not every backend has it
        temporaries = stats.temp_size_in_bytes if stats else 0
        malloc.keep_no_more_than_fits(temporaries)
        malloc.give_back_freed()  # nor is the compiler's memory
        if (block := malloc.block(temporaries)) is not None:
            _BLOCKS[program] = block
    return program(*args)


def block_of(program: Callable[..., Any]) -> malloc.Block | None:
    """The block of a program's temporaries, which it keeps from run to run, once :func:`first_run` has run it.

    Of such a program one run should be in flight: the next then has its temporaries where the last had them.
    :meth:`~xlatrain.host.malloc.Block.settle` is to be called as soon as one has begun.
    """
    return _BLOCKS.get(program) if _BLOCKS else None
