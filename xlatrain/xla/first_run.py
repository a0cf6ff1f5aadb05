"""The first run of a program, which compiles it, after memory that is no longer needed has been given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from xlatrain.host import malloc


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
