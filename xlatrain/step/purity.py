"""Whether a function computes the same each time that JAX traces it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


class ImpureFunctionError(TypeError):
    """A function that is to be traced as JAX does it depends on the host, or changes it."""


def check_pure(function: Callable[..., Any], specs: Sequence[Any], name: str) -> None:
    """Trace a function twice: it must compute the same both times, and keep nothing of the trace.

    Raises:
        ImpureFunctionError: it does not; names what differs.
    """
    first = jax.make_jaxpr(function)(*specs)
    try:
        with jax.checking_leaks():
            second = jax.make_jaxpr(lambda *arrays: function(*arrays))(*specs)
    except Exception as error:
        if "Leaked" not in str(error):
            raise
        raise ImpureFunctionError(
            f"{name} keeps an array of its trace in an attribute, a list or a global: it has no value once the step is compiled. "
            "Return it, log it, or write it into a variable (nnx.Variable). JAX says: "
            f"{str(error).strip().splitlines()[0][:300]}"
        ) from error
    if (found := _difference(first, second)) is not None:
        raise ImpureFunctionError(
            f"{name} does not compute the same each time that it is traced: {found}. A compiled step runs its Python once: draw "
            "with jax.random and nnx.Rngs, count in variables, and leave time and host state to hooks"
        )


def _difference(first: Any, second: Any) -> str | None:
    """The first line in which two jaxprs, or their constants, differ."""
    old, new = str(first.jaxpr).splitlines(), str(second.jaxpr).splitlines()
    for before, now in itertools.zip_longest(old, new, fillvalue="nothing"):
        if before != now:
            return f"at first `{before.strip()[:160]}`, then `{now.strip()[:160]}`"
    for before, now in zip(first.consts, second.consts, strict=True):
        if not np.array_equal(np.asarray(before), np.asarray(now)):
            return f"a constant {before.dtype}{list(before.shape)} has other values"
    return None
