"""JAX's persistent compilation cache, on by default: a program that was compiled once is loaded in the next process."""

from __future__ import annotations

import os
from pathlib import Path

import jax


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
