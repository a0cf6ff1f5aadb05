"""JAX's persistent compilation cache, on by default: a program that was compiled once is loaded in the next process.

And the first run of a program, which compiles it, after memory that is no longer needed has been given back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from xlatrain.host import malloc


def enable() -> Path | None:
    """Turn the cache on where the user has not decided, before the first program is compiled.

    It is kept in ``XLATRAIN_CACHE_DIR``, or in the user's cache folder; an empty ``XLATRAIN_CACHE_DIR`` turns it off.
    ``JAX_COMPILATION_CACHE_DIR`` and ``jax_compilation_cache_dir`` come first.

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
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def first_run(program: Callable[..., Any], *args: Any) -> Any:
    """``program(*args)``.

    Args:
        program: jitted, or compiled already.
        args: they may still be on their way onto the devices.
    """
    jax.block_until_ready(args)
    malloc.give_back_freed()  # memory that initialization and the capture needed is of no use to the program
    if hasattr(program, "lower"):
        compiled = program.lower(*args).compile()  # the call below finds it compiled
        stats = compiled.memory_analysis()  # not every backend has it
        malloc.keep_no_more_than_fits(stats.temp_size_in_bytes if stats else 0)
        malloc.give_back_freed()  # nor is the compiler's memory
    return program(*args)
