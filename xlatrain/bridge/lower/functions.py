"""Parts of a program that XLA compiles as functions of their own."""

from __future__ import annotations

import contextlib

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def not_inlined() -> contextlib.AbstractContextManager[None]:
    """A context in which a jitted function that is called is one of the program, with operands and results that are there once.

    What is inlined XLA:CPU may compute anew in each op that reads it. On several devices functions are inlined all the same:
    XLA:CPU 0.10 crashes where collectives of several processes are in them.
    """
    return set_xla_metadata(inlineable="false") if jax.device_count() == 1 else contextlib.nullcontext()
