"""Jaxprs, as JAX 0.10 and 0.11 write them, and the way into those inside of equations, which all passes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.extend import core


def is_closed(jaxpr: Any) -> bool:
    """Whether ``jaxpr`` is a closed jaxpr, beside whose equations its constants are. From JAX 0.11 on none is."""
    return core.ClosedJaxpr is not core.Jaxpr and isinstance(jaxpr, core.ClosedJaxpr)


def rewrapped(jaxpr: Any, rewrite: Callable[[Any], Any]) -> Any:
    """``jaxpr``, open or closed, with what ``rewrite`` makes of the open one."""
    return jaxpr.replace(jaxpr=rewrite(jaxpr.jaxpr)) if is_closed(jaxpr) else rewrite(jaxpr)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of operands of a ``scan`` with ``params`` that are constants, and behind them carried; the rest are stacks."""
    if "ft_in" in params:  # JAX 0.11
        constants, carried, _ = map(len, params["ft_in"].unpack())
        return constants, carried
    return params["num_consts"], params["num_carry"]


Fact = TypeVar("Fact")
"""What a pass knows of a variable."""

LOOPS = ("scan", "while")
_CALLS = ("jit", "pjit", "remat2", "checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


@dataclass(frozen=True)
class Body:
    """A jaxpr that an equation runs on its operands.

    Attributes:
        param: the equation's parameter that holds it, or a tuple with it.
        jaxpr: it, open.
        operands: the index of the operand that each input is, or in a loop begins as.
        carried: the inputs that a loop's turn before gives.
        rows: the first input, and the first output, that is a row of a stack.
        gives_results: whether the outputs are the equation's results, and not a condition.
    """

    param: str
    jaxpr: Any
    operands: Sequence[int]
    carried: range = range(0)
    rows: tuple[int | None, int | None] = (None, None)
    gives_results: bool = True

    def inputs(self, facts: Sequence[Fact], row: Callable[[Fact], Fact]) -> list[Fact]:
        """Facts about the equation's operands, as facts about the inputs; ``row`` makes one about a row of one about a stack."""
        return _mapped_from(self.rows[0], [facts[operand] for operand in self.operands], row)

    def outputs(self, facts: Sequence[Fact], row: Callable[[Fact], Fact]) -> list[Fact | None]:
        """Facts about the equation's results as facts about the outputs; None for those of a condition."""
        return [*_mapped_from(self.rows[1], facts, row)] if self.gives_results else [None] * len(self.jaxpr.outvars)

    def results(self, facts: Sequence[Fact], stack: Callable[[Fact], Fact]) -> list[Fact]:
        """Facts about the outputs, as facts about the results; ``stack`` makes one about a stack of one about a row."""
        return _mapped_from(self.rows[1], facts, stack)


def _mapped_from(start: int | None, facts: Sequence[Fact], change: Callable[[Fact], Fact]) -> list[Fact]:
    start = len(facts) if start is None else start
    return [*facts[:start], *map(change, facts[start:])]


def bodies(equation: Any) -> list[Body]:
    """The jaxprs that a call, a branch or a loop runs; none of others, such as ``shard_map``, whose author placed all."""
    name, params, operands = equation.primitive.name, equation.params, range(len(equation.invars))
    if name in _CALLS:
        return [_body(params, "jaxpr" if "jaxpr" in params else "call_jaxpr", operands)]
    if name == "cond":
        return [Body("branches", _opened(branch), operands[1:]) for branch in params["branches"]]
    if name == "while":
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        carried = operands[constants(equation) :]
        condition = [*operands[:of_condition], *carried]
        return [
            _body(params, "cond_jaxpr", condition, carried=range(of_condition, len(condition)), gives_results=False),
            _body(params, "body_jaxpr", operands[of_condition:], carried=range(of_body, of_body + len(carried))),
        ]
    if name == "scan":
        first, carried = scan_counts(params)
        return [_body(params, "jaxpr", operands, carried=range(first, first + carried), rows=(first + carried, carried))]
    return []


def constants(equation: Any) -> int:
    """How many operands of a loop, the first ones, are the same in each of its turns; 0 of what is no loop."""
    if equation.primitive.name == "scan":
        return scan_counts(equation.params)[0]
    return sum(equation.params.get(count, 0) for count in ("cond_nconsts", "body_nconsts"))


def _body(params: Mapping[str, Any], param: str, operands: Sequence[int], **options: Any) -> Body:
    return Body(param, _opened(params[param]), operands, **options)


def _opened(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if is_closed(jaxpr) else jaxpr


def with_bodies(equation: Any, rewritten: Sequence[Any]) -> Any:
    """``equation`` with other open jaxprs in place of those of its :func:`bodies`."""
    params, new = {**equation.params}, iter(rewritten)
    for param in dict.fromkeys(body.param for body in bodies(equation)):
        params[param] = _value(params[param], lambda _: next(new))
    return equation.replace(params=params)


def with_jaxprs(equation: Any, rewrite: Callable[[Any], Any]) -> Any:
    """``equation`` with what ``rewrite`` makes of each open jaxpr in its parameters, whatever its primitive."""
    changed = {key: new for key, value in equation.params.items() if (new := _value(value, rewrite)) is not value}
    return equation.replace(params={**equation.params, **changed}) if changed else equation


def _value(value: Any, rewrite: Callable[[Any], Any]) -> Any:
    if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
        return rewrapped(value, rewrite)
    if isinstance(value, tuple) and any(isinstance(one, core.Jaxpr | core.ClosedJaxpr) for one in value):
        return tuple(_value(one, rewrite) for one in value)
    return value


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
