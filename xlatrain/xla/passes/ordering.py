"""Collectives of several processes one after the other, where XLA:CPU would run them beside a loop that has some as well.

XLA:CPU starts the collectives of a program in the order of its schedule. One that stands in the program itself has ended when
the next one starts; a loop with collectives inside has only begun: what follows in the schedule and does not need its results
may run beside it. In one process each collective finds its own. Between processes gloo tells them apart by their order alone: a
gather that follows a loop over layers may meet one of the loop's on another process, which ends both processes if the sizes
differ, and is silent if not (jaxlib 0.10.2; ``benchmarks/notes/memory_on_cpu.md``).

So each loop is given all results of collectives before it, and everything after it, that could be communicated, is given its
result: in the *jaxpr* of the step, after differentiation, by a choice that always falls on the same side, of which the compiler
does not know that. It costs a sum of a few bytes for each loop, and a pass over the operands that follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh

from xlatrain.mesh.mesh import is_multiprocess, platform
from xlatrain.xla.jaxprs import bodies, constants, rewrapped, spliced, with_bodies
from xlatrain.xla.passes import is_needed


def needs_order(mesh: Mesh | AbstractMesh) -> bool:
    """Whether collectives on ``mesh`` are told apart by their order."""
    is_real = isinstance(mesh, Mesh)  # not one without devices
    return is_needed("ordering") and is_real and platform(mesh) == "cpu" and is_multiprocess(mesh)


def serialize_collectives(closed: Any, split: Sequence[bool], devices: int) -> Any:
    """A closed jaxpr whose loops and collectives follow each other.

    They do as its equations do, but where a large result, such as the gradient of a table, can wait for a loop that does not need
    it: whole, as XLA:CPU sums it, it would be kept while the loop runs.

    Args:
        split: of each input whether devices may hold different parts of it. What comes from others alone is left as it is.
        devices: how many there are.
    """
    return rewrapped(closed, lambda jaxpr: _Ordering(jaxpr, split, devices).rewritten())


class _Ordering:
    """The pass over one jaxpr, and over the jaxprs inside of it."""

    def __init__(self, jaxpr: Any, split: Sequence[bool], devices: int) -> None:
        self._jaxpr, self._devices = jaxpr, devices
        self._producers = {var: i for i, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
        self._split = {var for var, is_split in zip(jaxpr.invars, split, strict=True) if is_split}
        self._equations: list[Any] = []
        self._passed: Any = None  # bool[], True, known when the last loop has ended
        self._after: set[Any] = set()  # variables that depend on that loop
        self._pending: list[tuple[int, Any]] = []  # since that loop: which equations may have communicated, and a result of each

    def rewritten(self) -> Any:
        if not any(map(_has_loop, self._jaxpr.eqns)):
            return self._jaxpr
        for equation in self._jaxpr.eqns:
            if any(var in self._split for var in _variables(equation)):
                self._split.update(equation.outvars)
        for index in self._order():
            equation = self._jaxpr.eqns[index]
            if _has_loop(equation):
                self._loop(index, equation)
            else:
                self._other(index, equation)
        return self._jaxpr.replace(eqns=self._equations)

    # -- the order ---------------------------------------------------------------------------------------------------

    def _order(self) -> list[int]:
        """The equations in order; those that are better kept waiting, and those that need them, come behind the next loop."""
        order: list[int] = []
        since: list[int] = []  # the last loop
        for index, equation in enumerate(self._jaxpr.eqns):
            if not _has_loop(equation):
                since.append(index)
                continue
            needed, late = self._ancestors(index), set[int]()
            for before in since:
                if before not in needed and (self._producers_of(before) & late or self._can_wait(self._jaxpr.eqns[before])):
                    late.add(before)
            order += [*(before for before in since if before not in late), index]
            since = [before for before in since if before in late]
        return order + since

    def _can_wait(self, equation: Any) -> bool:
        """Whether what an equation needs, of which each device has its rows, is smaller than its result, whole on each."""
        if not self._communicates(equation):
            return False
        needed = sum(_bytes(var) for var in _variables(equation) if var in self._producers)
        return sum(map(_bytes, equation.outvars)) > max(needed / self._devices, _SMALL)

    def _producers_of(self, index: int) -> set[int]:
        return {self._producers[var] for var in _variables(self._jaxpr.eqns[index]) if var in self._producers}

    def _ancestors(self, index: int) -> set[int]:
        """The indices of the equations that the equation at ``index`` needs."""
        found: set[int] = set()
        waiting = [index]
        while waiting:
            new = self._producers_of(waiting.pop()) - found
            found |= new
            waiting += new
        return found

    # -- the equations -------------------------------------------------------------------------------------------------

    def _loop(self, index: int, equation: Any) -> None:
        needed = self._ancestors(index)
        awaited = [self._token(var) for before, var in self._pending if before not in needed]
        operands = list(equation.invars)
        if self._passed is not None and not self._depends(operands):
            awaited.append(self._passed)
        for token in awaited:
            for at in _carried(equation):
                operands[at] = self._spliced(_held, operands[at], token)
        self._equations.append(self._inside(equation).replace(invars=operands))
        self._after, self._pending = set(equation.outvars), []
        results = [equation.outvars[at] for at in _smallest(equation.outvars)]
        if results:
            self._passed = self._token(*results)

    def _other(self, index: int, equation: Any) -> None:
        communicates = self._communicates(equation)
        is_open = [communicates and self._passed is not None and self._is_open(var) for var in equation.invars]
        if any(is_open) or self._depends(equation.invars):
            self._after.update(equation.outvars)
        operands = [self._fenced(var, self._passed) if late else var for var, late in zip(equation.invars, is_open, strict=True)]
        equation = equation.replace(invars=operands)
        self._equations.append(equation)
        results = _smallest(equation.outvars)
        if communicates and results:
            self._pending.append((index, equation.outvars[results[0]]))

    def _communicates(self, equation: Any) -> bool:
        return _communicates(equation) and any(var in self._split for var in equation.outvars)

    def _depends(self, operands: Iterable[Any]) -> bool:
        return any(var in self._after for var in operands if not isinstance(var, core.Literal))

    def _is_open(self, var: Any) -> bool:
        """Whether a collective on ``var`` could run beside the last loop."""
        if isinstance(var, core.Literal) or var in self._after or var not in self._split:
            return False
        return _is_plain(var) and var.aval.ndim > 0

    def _inside(self, equation: Any) -> Any:
        """``equation`` with its own jaxprs in order."""
        split = [not isinstance(var, core.Literal) and var in self._split for var in equation.invars]
        ordered = []
        for body in bodies(equation):
            given = [at in body.carried or is_split for at, is_split in enumerate(body.inputs(split, bool))]
            ordered.append(_Ordering(body.jaxpr, given, self._devices).rewritten())
        return with_bodies(equation, ordered)

    def _token(self, *variables: Any) -> Any:
        return self._spliced(_token, *variables)

    def _fenced(self, var: Any, token: Any) -> Any:
        return self._spliced(_fenced, var, token)

    def _spliced(self, function: Callable[..., Any], *operands: Any) -> Any:
        """The variable of ``function(*operands)``, whose equations are added."""
        equations, result = spliced(function, operands)
        self._equations += equations
        return result


_SMALL = 1 << 20
"""Bytes of a result that is not worth waiting."""


def _variables(equation: Any) -> list[Any]:
    return [var for var in equation.invars if not isinstance(var, core.Literal)]


def _bytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize if _is_plain(var) else 0


def _token(*arrays: jax.Array) -> jax.Array:
    """A bool scalar, True, that is known only once the arrays have been computed."""
    return functools.reduce(lax.bitwise_and, map(_is_there, arrays))


def _is_there(x: jax.Array) -> jax.Array:
    x = lax.optimization_barrier(_without_key(x))
    x = lax.real(x) if jnp.iscomplexobj(x) else x
    largest = lax.reduce_max(lax.convert_element_type(x, jnp.float32), tuple(range(x.ndim)))
    return lax.le(lax.population_count(lax.bitcast_convert_type(largest, jnp.uint32)), jnp.uint32(32))


def _without_key(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if _is_key(x) else x


def _fenced(x: jax.Array, token: jax.Array) -> jax.Array:
    """``x``, when the token is known.

    The barrier takes on what a ``sharding_constraint`` behind it says, not the choice, which would follow the gather then.
    """
    return lax.optimization_barrier(lax.select_n(lax.broadcast(token, x.shape), lax.full_like(x, 0), x))


def _held(x: jax.Array, token: jax.Array) -> jax.Array:
    """Make ``x`` wait for ``token``, as :func:`_fenced` does, also where the compiler may know ``x`` (zeros, a count).

    The choice is between ``x`` and another value: between two equal constants the compiler would see no choice.
    """
    if _is_key(x):
        return jax.random.wrap_key_data(_held(jax.random.key_data(x), token), impl=jax.random.key_impl(x))
    other = lax.bitwise_not(x) if x.dtype == jnp.bool_ else lax.add(x, lax.full_like(x, 1))
    return lax.select_n(lax.broadcast(token, x.shape), other, x)


def _carried(equation: Any) -> list[int]:
    """Operands that a loop cannot begin without, and that the compiler does not know."""
    if equation.primitive.name == "cond":
        return [0]
    fixed = constants(equation)
    return [fixed + at for at in _smallest(equation.invars[fixed:])] or _smallest(equation.invars[:fixed])


def _smallest(variables: Sequence[Any]) -> list[int]:
    """The index of the smallest array of floats. Without floats all indices: the compiler may know a counter's end beforehand."""
    usable = {i: var for i, var in enumerate(variables) if _is_plain(var) or _is_key(var)}
    floats = {i: var.aval.size for i, var in usable.items() if jnp.issubdtype(var.aval.dtype, jnp.inexact)}
    known = [i for i in floats if not isinstance(variables[i], core.Literal)] or list(floats)
    return [min(known, key=floats.__getitem__)] if known else list(usable)


def _is_plain(var: Any) -> bool:
    """Whether a variable is an array of numbers: not a random key, not a token, not dropped."""
    return not isinstance(var, core.DropVar) and isinstance(getattr(var.aval, "dtype", None), jnp.dtype)


def _is_key(value: Any) -> bool:
    """Whether a variable that is not dropped, or an array, has a dtype of random keys."""
    dtype = getattr(getattr(value, "aval", value), "dtype", None)
    return not isinstance(value, core.DropVar) and dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


_LOOPS = {"scan", "while", "cond", "shard_map"}


def _has_loop(equation: Any) -> bool:
    """Whether an equation runs other equations that may communicate, and goes on while they do."""
    inner = [e for jaxpr in core.jaxprs_in_params(equation.params) for e in jaxpr.eqns]
    if equation.primitive.name in _LOOPS:
        return any(map(_may_communicate, inner))
    return any(map(_has_loop, inner))


def _may_communicate(equation: Any) -> bool:
    inner = [e for jaxpr in core.jaxprs_in_params(equation.params) for e in jaxpr.eqns]
    return any(map(_may_communicate, inner)) if inner else _communicates(equation)


_LOCAL = {
    "broadcast_in_dim",
    "convert_element_type",
    "transpose",
    "squeeze",
    "expand_dims",
    "iota",
    "copy",
    "optimization_barrier",
}


def _communicates(equation: Any) -> bool:
    """Whether the partitioner may put a collective before or behind an equation: not where all devices hold what they need."""
    if equation.primitive.name in _LOCAL:
        return False
    if equation.primitive.name == "sharding_constraint":
        return True
    shapes = [var.aval.shape for var in equation.invars if getattr(var.aval, "shape", ())]
    return len(shapes) > 1 or any(getattr(out.aval, "shape", None) not in shapes for out in equation.outvars if shapes)
