"""Jaxprs, as JAX 0.10 and 0.11 write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend import core


def is_closed(jaxpr: Any) -> bool:
    """Whether ``jaxpr`` is another one with constants beside it: none is from JAX 0.11 on, where each holds its own."""
    return core.ClosedJaxpr is not core.Jaxpr and isinstance(jaxpr, core.ClosedJaxpr)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a ``scan`` with ``params`` are constants, how many behind them carried; the rest are stacks."""
    if "ft_in" in params:  # JAX 0.11
        constants, carried, _ = map(len, params["ft_in"].unpack())
        return constants, carried
    return params["num_consts"], params["num_carry"]
