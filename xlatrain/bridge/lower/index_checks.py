"""Indices out of range, found inside the program: the largest index of each op, beside the step's results.

torch's kernels raise at a label or token that is out of range; a compiled step reads NaN and drops what is written. So each op
that takes an index tensor gives the program one number more: the maximum of its indices as unsigned integers, in which negative
ones are large, too. One reduction over the indices finds both ends. :class:`IndexFindings` packs them into three numbers for
the host, however many ops there are: which check failed first, and the index.

Left out: what cannot be out of range by how it was made (``argmax``, ``clamp``, ``arange``), and the same index checked before.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx.node import Node

import xlatrain.bridge.capture.vocabulary  # noqa: F401  defines the op
from xlatrain.bridge.capture.capture import Capture
from xlatrain.bridge.loops.schedule import Schedule
from xlatrain.bridge.lower.index_bounds import IndexBounds
from xlatrain.bridge.lower.operands import canonical_dim

VARIABLE = "XLATRAIN_INDEX_CHECKS"
aten = torch.ops.aten
_NO_CLASS = torch.iinfo(torch.int64).min


def checks_are_on() -> bool:
    """Whether programs that are made now look for indices out of range."""
    return os.environ.get(VARIABLE, "1") != "0"


@dataclass(frozen=True)
class _Index:
    """An index operand of an op.

    Attributes:
        op: its name.
        of: finds it among the op's arguments, of the graph or of the program.
        size: the smallest number that is too large for it.
        wraps: negative numbers count from the end.
        said: stock's error, given the index.
        dim: of the first operand, whose size it is; None: of no dim.
    """

    op: str
    of: Callable[[Sequence[Any]], Any]
    size: int
    wraps: bool
    said: Callable[[int], Exception]
    dim: int | None = None


@dataclass(frozen=True)
class IndexCheck:
    """A check of one index tensor.

    Attributes:
        node: the op.
        index: its operand.
    """

    node: Node
    index: _Index

    def maximum(self, args: Sequence[Any], size: jax.Array | int) -> jax.Array:
        """The largest index as an unsigned scalar, counted from ``-size`` where negative ones are allowed."""
        values = self.index.of(args)
        if values.dtype.itemsize < 4 or values.dtype in (np.dtype(np.uint32), np.dtype(np.uint64)):
            values = values.astype(jnp.int32)
        if self.index.wraps:
            values = values + jnp.asarray(size, values.dtype)
        unsigned = lax.bitcast_convert_type(values, np.dtype(f"uint{8 * values.dtype.itemsize}"))
        return jnp.minimum(jnp.max(unsigned), np.asarray(2**32 - 1, unsigned.dtype)).astype(jnp.uint32)

    def limit(self, size: Any) -> Any:
        """The smallest :meth:`maximum` that is too large."""
        return size * (2 if self.index.wraps else 1)

    def error(self, maximum: int) -> Exception:
        """The error that stock's kernel raises, given the :meth:`maximum`."""
        value = maximum - (self.index.size if self.index.wraps else 0)
        return self.index.said(value - 2**32 if value >= 2**31 else value)


class IndexFindings:
    """The maxima of a program's checks while it is traced.

    Args:
        checks: all of the program, in the order of its ops.
    """

    def __init__(self, checks: Sequence[IndexCheck]) -> None:
        self._checks = checks
        self._of: dict[Node, list[int]] = {}
        for number, check in enumerate(checks):
            self._of.setdefault(check.node, []).append(number)
        self._found: dict[int, jax.Array] = {}
        self._sizes: dict[int, jax.Array] = {}  # true ones, where the graph's are bounds

    def follow(self, schedule: Schedule) -> None:
        """Take the schedule of what runs: of a loop's body one copy is computed, which stands for all."""
        for loop in schedule.loops:
            places = {node: position for position, node in enumerate(loop.copies[0])}
            for op in loop.body:
                place = places.get(op.key)  # None: a loop makes it for itself
                copies = [op.node] if place is None else [copy[place] for copy in loop.copies]
                of_copies = [self._of[node] for node in copies if node in self._of]
                if of_copies:
                    self._of[op.node] = of_copies[0]

    def stand_in(self, node: Node, original: Node) -> None:
        """``node`` computes a part of what ``original`` would."""
        if original in self._of:
            self._of[node] = self._of[original]

    def looks_at(self, node: Node) -> bool:
        """Whether an op has indices to check."""
        return node in self._of

    def note(self, node: Node, args: Sequence[Any], size: Callable[[int], jax.Array | None] | None = None) -> None:
        """An op is computed with these arguments.

        Args:
            size: the true size of a dim of the first operand; None: that of the graph.
        """
        for number in self._of.get(node, ()):
            index = self._checks[number].index
            true = None if size is None or index.dim is None else size(index.dim)
            if true is not None:
                self._sizes[number] = true
            found = self._checks[number].maximum(args, index.size if true is None else true)
            before = self._found.get(number)
            self._found[number] = found if before is None else jnp.maximum(found, before)

    def of_body(self, body: Callable[[], Any]) -> tuple[Any, dict[int, jax.Array]]:
        """Call ``body()``: what it returns, and the maxima that it found, which belong to the body's trace."""
        outside, self._found = self._found, {}
        try:
            return body(), self._found
        finally:
            self._found = outside

    def note_loop(self, found: Mapping[int, jax.Array]) -> None:
        """A loop has run, whose body found these maxima: (copies,) each."""
        for number, maxima in found.items():
            whole = jnp.max(maxima)
            before = self._found.get(number)
            self._found[number] = whole if before is None else jnp.maximum(whole, before)

    def packed(self) -> tuple[list[jax.Array], jax.Array | None]:
        """Three float32 scalars that :func:`finding` reads, and whether all is in range; none and None without checks."""
        if not self._found:
            return [], None
        numbers = sorted(self._found)
        maxima = jnp.stack([self._found[number] for number in numbers])
        limits = [self._checks[number].limit(self._sizes.get(number, self._checks[number].index.size)) for number in numbers]
        outside = maxima >= (
            jnp.stack([jnp.asarray(one, jnp.uint32) for one in limits]) if self._sizes else np.asarray(limits, np.uint32)
        )
        first = jnp.argmax(outside)
        any_outside = outside[first]
        number = jnp.where(any_outside, jnp.asarray(np.asarray(numbers, np.int32) + 1)[first], 0)
        value = maxima[first]
        parts = (number, value >> 16, value & 0xFFFF)  # whole numbers that float32 holds
        return [part.astype(jnp.float32) for part in parts], ~any_outside


def finding(checks: Sequence[IndexCheck], packed: np.ndarray) -> tuple[IndexCheck, Exception] | None:
    """The check that failed, with stock's error, by the last three of a program's packed scalars; None if none did."""
    number = int(packed[-3])
    if not number:
        return None
    check = checks[number - 1]
    return check, check.error(int(packed[-2]) * 2**16 + int(packed[-1]))


def index_checks(capture: Capture) -> tuple[IndexCheck, ...]:
    """The checks that the graph needs."""
    bounds = IndexBounds(capture.constants)
    seen: set[tuple[Node, int, bool]] = set()
    checks = []
    for node in capture.graph.graph.nodes:
        for index in _indices(node):
            operand = index.of(node.args)
            key = (operand, index.size, index.wraps)
            low = -index.size if index.wraps else 0
            if key not in seen and not bounds.within(operand, low, index.size - 1):
                checks.append(IndexCheck(node, index))
            seen.add(key)
    return tuple(checks)


# -- the ops ---------------------------------------------------------------------------------------------------------------


def _indices(node: Node) -> Iterator[_Index]:
    """The index operands of an op that torch would check."""
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    for index in () if rule is None else rule(node):
        value = _value(index.of(node.args))
        if value is not None and value.numel() and value.dtype not in (torch.bool, torch.uint8):
            yield index


def _value(node: Any) -> torch.Tensor | None:
    """The tensor that a node promises."""
    return node.meta.get("val") if isinstance(node, Node) else None


def _shape(node: Node) -> tuple[int, ...]:
    value = _value(node.args[0])
    return () if value is None else tuple(value.shape)


def _name(node: Node) -> str:
    return str(node.target).split(".")[1]


def _at(position: int) -> Callable[[Sequence[Any]], Any]:
    return lambda args: args[position]


def _out_of_bounds(kind: type[Exception], dim: int, size: int, start: str = "") -> Callable[[int], Exception]:
    return lambda value: kind(f"{start}index {value} is out of bounds for dimension {dim} with size {size}")


def _in_self(value: int) -> Exception:
    return IndexError("index out of range in self")


def _embedding(node: Node) -> Iterator[_Index]:
    yield _Index("embedding", _at(1), _shape(node)[0], wraps=False, said=_in_self, dim=0)


def _put(node: Node) -> Iterator[_Index]:
    value = _value(node.args[0])
    size = 0 if value is None else value.numel()
    text = "out of range: tried to access index {} on a tensor of {} elements."
    yield _Index(_name(node), _at(1), size, wraps=True, said=lambda index: IndexError(text.format(index, size)))


def _along(said: Callable[[int, int], Callable[[int], Exception]] | None, *, wraps: bool = False) -> Callable[[Node], Any]:
    """The rule of an op ``(x, dim, index, …)``; ``said(dim, size)`` is its error, None for "index out of range in self"."""

    def rule(node: Node) -> Iterator[_Index]:
        shape: tuple[int, ...] = _shape(node) or (1,)
        dim = canonical_dim(node.args[1], len(shape))  # pyright: ignore[reportArgumentType]
        size = shape[dim]
        yield _Index(_name(node), _at(2), size, wraps, _in_self if said is None else said(dim, size), dim)

    return rule


def _gather(node: Node) -> Iterator[_Index]:
    for index in _along(functools.partial(_out_of_bounds, RuntimeError))(node):
        if _is_target(node.args[2]):
            index = dataclasses.replace(index, op="nll_loss", said=_no_target)
        yield index


def _picked(node: Node) -> Iterator[_Index]:
    """The index of what was a ``gather`` from log-probabilities (:mod:`xlatrain.bridge.capture.vocabulary`)."""
    weight = _value(node.args[1])
    size = 0 if weight is None else weight.shape[0]
    if _is_target(node.args[3]):
        yield _Index("nll_loss", _at(3), size, wraps=False, said=_no_target)
    else:
        yield _Index("gather", _at(3), size, wraps=False, said=_out_of_bounds(RuntimeError, 1, size))


def _no_target(value: int) -> Exception:
    return IndexError(f"Target {value} is out of bounds.")


def _is_target(index: Any) -> bool:
    """Whether an index is ``where(target != ignore_index, target, 0)``, as the decomposition of ``nll_loss`` makes it."""
    if isinstance(index, Node) and index.target is aten.unsqueeze.default:
        index = index.args[0]
    if not isinstance(index, Node) or index.target is not aten.where.self:
        return False
    condition, target, other = index.args
    return all(isinstance(part, Node) for part in (condition, target, other)) and (
        condition.target is aten.ne.Scalar and condition.args[0] is target and other.target is aten.scalar_tensor.default  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    )


def _advanced(node: Node) -> Iterator[_Index]:
    """``x[indices]``, with None for a dim that stays whole; none where a mask is among them, which covers dims of its own."""
    shape, given = _shape(node), node.args[1]
    assert isinstance(given, list | tuple)
    values = [_value(index) for index in given]
    if any(value is not None and value.dtype in (torch.bool, torch.uint8) for value in values):
        return
    for dim, value in enumerate(values):
        if value is not None:
            of = functools.partial(_item, dim)
            yield _Index(_name(node), of, shape[dim], wraps=True, said=_out_of_bounds(IndexError, dim, shape[dim]), dim=dim)


def _item(dim: int, args: Sequence[Any]) -> Any:
    return args[1][dim]


def _one_hot(node: Node) -> Iterator[_Index]:
    """``classes >= number`` in what ``F.one_hot`` is captured as (:mod:`xlatrain.bridge.capture.traceable.value_checks`)."""
    classes, size = node.args[0], node.args[1]
    outside = _only_user(node, aten.bitwise_or.Tensor)
    marked = _only_user(_only_user(outside, aten.unsqueeze.default), aten.where.self)
    if outside is None or marked is None or not isinstance(size, int):
        return
    low, other = outside.args[0], marked.args[1]
    if not isinstance(low, Node) or low.target is not aten.lt.Scalar or low.args != (classes, 0):
        return
    if not isinstance(other, Node) or other.target is not aten.scalar_tensor.default or other.args[0] != _NO_CLASS:
        return
    yield _Index("one_hot", _at(0), size, wraps=False, said=_no_class)


def _only_user(node: Node | None, target: Any) -> Node | None:
    """The node that uses ``node``, if it is one alone, of this op."""
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _no_class(value: int) -> Exception:
    return RuntimeError(f"Class values must be {'non-negative' if value < 0 else 'smaller than num_classes'}.")


def _rules() -> dict[Any, Callable[[Node], Iterator[_Index]]]:
    out_of_bounds = functools.partial(_out_of_bounds, RuntimeError)
    named = functools.partial(_out_of_bounds, IndexError, start="index_copy_(): ")
    rules: dict[Any, Callable[[Node], Iterator[_Index]]] = {
        aten.embedding.default: _embedding,
        aten.put.default: _put,
        aten.gather.default: _gather,
        torch.ops.xlatrain.picked_log_softmax.default: _picked,
        aten.index_select.default: _along(None),
        aten.index_copy.default: _along(named),
        aten.index_fill.int_Scalar: _along(functools.partial(_out_of_bounds, IndexError), wraps=True),
        aten.index_fill.int_Tensor: _along(functools.partial(_out_of_bounds, IndexError), wraps=True),
        aten.index.Tensor: _advanced,
        aten.index_put.default: _advanced,
        aten._index_put_impl.default: _advanced,
        aten.ge.Scalar: _one_hot,
    }
    scatters = (aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter.reduce, aten.scatter.value_reduce)
    rules |= dict.fromkeys((*scatters, aten.scatter_reduce.two, aten.index_add.default), _along(out_of_bounds))
    rules[aten.index_reduce.default] = _along(None)
    return rules


_RULES = _rules()
