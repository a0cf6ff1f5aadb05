"""Jaxprs, as JAX 0.10 and 0.11 write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core


def is_closed(jaxpr: Any) -> bool:
    """Whether ``jaxpr`` is a closed jaxpr, beside whose equations its constants are. From JAX 0.11 on none is."""
    return core.ClosedJaxpr is not core.Jaxpr and isinstance(jaxpr, core.ClosedJaxpr)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of operands of a ``scan`` with ``params`` that are constants, and behind them carried; the rest are stacks."""
    if "ft_in" in params:  # JAX 0.11
        constants, carried, _ = map(len, params["ft_in"].unpack())
        return constants, carried
    return params["num_consts"], params["num_carry"]


def spliced(function: Callable[..., Any], operands: Sequence[Any]) -> tuple[list[Any], Any]:
    """The equations of ``function`` over variables of another jaxpr, to be put into it, and the variable of the result."""
    given = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type) for var in operands]
    jaxpr = jax.make_jaxpr(lambda *arrays: function(*arrays))(*given).jaxpr  # traced anew: variables of its own
    real = dict(zip(jaxpr.invars, operands, strict=True))
    equations = []
    for equation in jaxpr.eqns:
        names = [var if isinstance(var, core.Literal) else real.get(var, var) for var in equation.invars]
        equations.append(equation.replace(invars=names))
    return equations, jaxpr.outvars[0]
