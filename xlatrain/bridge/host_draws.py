"""The random numbers of a program that torch draws on the host, before the program runs: its inputs, and torch's own.

A captured graph has an op for each draw (:mod:`xlatrain.bridge.random`), with all that torch needs to make it: the method, size,
strides and parameters. :class:`HostDraws` makes them, in the order of the step, from torch's generator, which ends where torch
would have left it. Draws that are alike but for their number lie in one array, of which a loop over layers takes a row each turn.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xlatrain.bridge.random import RandomStream, draws
from xlatrain.bridge.tensors.dtypes import jax_dtype, torch_dtype
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.bridge.tensors.strides import empty

MOST_BYTES = 4 << 30
"""Of the numbers of one run of a program; where there are more, all are drawn in the program."""

_VALUE_DEPENDENT = frozenset({"poisson", "binomial", "gamma"})
"""Ops of which torch draws as many numbers as the values of their operands say: always drawn in the program."""


@dataclass(frozen=True)
class HostDraw:
    """A draw as torch makes it on the CPU.

    Attributes:
        method: of the tensor that is filled; ``"randperm"`` is a function.
        size, strides: of that; strides are () where it is contiguous.
        dtype: of torch.
        parameters: arguments of the method.
    """

    method: str
    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    parameters: tuple[int | float, ...]

    @classmethod
    def of(cls, target: torch._ops.OpOverload, args: Sequence[Any]) -> HostDraw | None:
        """The draw of a node's op; None for one that is always drawn in the program."""
        name, values = target._schema.name.split("::")[1], args[:-1]
        if name in _VALUE_DEPENDENT or not draws(target):
            return None
        if name == "randperm":
            return cls(name, (values[0],), (), values[1], ())
        return cls(f"{name}_", tuple(values[0]), tuple(values[1]), values[2], tuple(values[3:]))

    @property
    def array_dtype(self) -> np.dtype:
        """The dtype of its array in a program. Zeros and ones take a byte each, which draws the same."""
        return np.dtype(np.bool_) if self.method == "bernoulli_" else jax_dtype(self.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.array_dtype.itemsize

    def fill(self, out: torch.Tensor) -> None:
        """Draw into ``out``, a contiguous tensor of this size and :attr:`array_dtype`.

        Raises:
            OverflowError: a whole number does not fit.
        """
        if self.method == "randperm":
            out.copy_(torch.randperm(*self.size, dtype=self.dtype))
            return
        own = out if self.method == "bernoulli_" else None
        dtype = torch.bool if self.method == "bernoulli_" else self.dtype
        if self.strides or out.dtype != dtype:
            own = empty(self.size, dtype, self.strides or None)
        drawn = self._draw(out if own is None else own)
        if drawn is not out:
            if not out.is_floating_point() and out.itemsize < drawn.itemsize and drawn.numel():
                _check_fits(drawn, torch.iinfo(out.dtype))
            out.copy_(drawn)

    def _draw(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.method == "whole_range_":
            return tensor.random_()
        if self.method == "randint_":
            low, high = self.parameters
            return tensor.random_(int(low), None if high > torch.iinfo(torch.int64).max else int(high))  # pyright: ignore
        return getattr(tensor, self.method)(*self.parameters)


def _check_fits(drawn: torch.Tensor, limits: torch.iinfo) -> None:
    if int(drawn.min()) < limits.min or int(drawn.max()) > limits.max:
        raise OverflowError(
            f"random integers up to {int(drawn.max())} do not fit {limits.dtype}, which programs compute torch's {drawn.dtype} "
            "as: draw from a smaller range, or enable 64-bit types (jax_enable_x64)"
        )


def _literals(node: torch.fx.Node) -> Hashable:
    """The draw of a node, to which another is equal that gives the same from the same state of the generator."""
    draw = HostDraw.of(node.target, node.args)  # pyright: ignore[reportArgumentType]
    return draw or (node.target, *(arg if isinstance(arg, torch.fx.Node) else repr(arg) for arg in node.args[:-1]))


def number_anew(graph: torch.fx.Graph, stream: RandomStream) -> tuple[dict[int, int], int]:
    """Give draws one number that are made again from a state of the generator that was set back, as a recomputation does.

    Returns:
        Number → the draw after whose state it is made, -1 for that before the step; and the draw after whose state the step ends.
    """
    nodes: dict[int, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if draws(node.target):
            nodes.setdefault(cast(int, node.args[-1]), []).append(node)
    parents: dict[int, int] = {}
    known: dict[tuple[int, Hashable], int] = {}
    moves, reads, now = list(stream.moves), [], -1
    for number in (*sorted(nodes), None):
        while moves and (number is None or moves[0].index <= number):
            move = moves.pop(0)
            now = now if move.to is None else reads[move.to]
            reads.append(now)
        if number is not None:
            same = known.setdefault((now, _literals(nodes[number][0])), number)
            if same == number:
                parents[number] = now
            for node in nodes[number]:
                node.args = (*node.args[:-1], same)
            now = same
    return parents, now


class HostDraws:
    """The draws of a captured graph that torch makes, by their numbers.

    Args:
        draws: number → draw.
        parents: number → the draw after whose state of the generator it is made, -1 for that before the step.
        end: the draw after whose state the step ends.

    Attributes:
        kinds: the draws that differ in more than their number: each has an array, of shape (draws, *size).
        rows: number of a draw → its array, and its row there.
    """

    def __init__(self, draws: Mapping[int, HostDraw], parents: Mapping[int, int], end: int) -> None:
        self.draws, self._parents, self._end = dict(draws), dict(parents), end
        last = [-1, *parents]
        self._kept = {parent for before, parent in zip(last, parents.values(), strict=False) if parent != before}
        self._kept |= {end} - {last[-1]}
        numbers: dict[HostDraw, list[int]] = {}
        for number, draw in self.draws.items():
            numbers.setdefault(draw, []).append(number)
        self.kinds = {draw: (place, of_kind) for place, (draw, of_kind) in enumerate(numbers.items())}
        self.rows = {one: (place, row) for place, of_kind in self.kinds.values() for row, one in enumerate(of_kind)}

    @classmethod
    def of(cls, graph: torch.fx.Graph, stream: RandomStream) -> HostDraws | None:
        """The draws of a graph from which nothing has been removed: torch draws, too, what nobody uses.

        None where the program draws them.
        """
        if not stream.by_torch or not stream.used:
            return None
        parents, end = number_anew(graph, stream)
        found: dict[int, HostDraw] = {}
        for node in graph.nodes:
            draw = HostDraw.of(node.target, node.args) if draws(node.target) else None
            if draw is not None:
                found[node.args[-1]] = draw
        found = dict(sorted(found.items()))
        return cls(found, parents, end) if found and sum(one.bytes for one in found.values()) <= MOST_BYTES else None

    def make(self, true: HostDraws, known: dict[int, torch.Tensor] | None = None) -> tuple[np.ndarray, ...]:
        """Draw the arrays of a run from torch's generator, which ends where the step leaves it.

        Args:
            true: the step's own draws, where these are of larger sizes: there is nothing in the arrays beside them.
            known: what was drawn before, by number, which is not drawn again; what is drawn is added.

        Raises:
            OverflowError: whole numbers that do not fit the program's.
        """
        arrays = [_zeros(draw, len(numbers), padded=true is not self) for draw, (_, numbers) in self.kinds.items()]
        states = {-1: torch.get_rng_state()} if -1 in true._kept else {}
        now = -1
        for number, parent in true._parents.items():
            draw = true.draws.get(number)
            place, row = self.rows.get(number, (0, 0))
            if parent != now:
                torch.set_rng_state(states[parent])
            if draw is not None and known is not None and number in known:
                arrays[place][row] = known[number]
            elif draw is not None:
                drawn = _drawn_into(arrays[place][row], draw)
                if known is not None:
                    known[number] = drawn
            now = number
            if number in true._kept:
                states[number] = torch.get_rng_state()
        if now != true._end:
            torch.set_rng_state(states[true._end])
        return tuple(map(as_numpy, arrays))

    def number(self, arrays: Sequence[jax.Array], draw: HostDraw, index: int | jax.Array) -> jax.Array:
        """The numbers of a draw, among the arrays of a run, in the dtype of its array; ``index`` may be traced, in a loop."""
        if isinstance(index, int):
            place, row = self.rows[index]
            return arrays[place][row]
        place, numbers = self.kinds[draw]
        rows = np.zeros(numbers[-1] + 1, np.int32)
        rows[numbers] = np.arange(len(numbers))
        return jax.lax.dynamic_index_in_dim(arrays[place], jnp.asarray(rows)[index], keepdims=False)


def _drawn_into(out: torch.Tensor, draw: HostDraw) -> torch.Tensor:
    """Draw into ``out``, which may be larger."""
    if out.shape == draw.size:
        draw.fill(out)
        return out
    drawn = torch.empty(draw.size, dtype=out.dtype)
    draw.fill(drawn)
    out[tuple(slice(size) for size in draw.size)] = drawn
    return out


def _zeros(draw: HostDraw, count: int, *, padded: bool) -> torch.Tensor:
    make = torch.zeros if padded else torch.empty
    return make((count, *draw.size), dtype=torch_dtype(draw.array_dtype))


_DRAWN: contextvars.ContextVar[tuple[HostDraws, Sequence[jax.Array]] | None] = contextvars.ContextVar(
    "xlatrain_host_draws", default=None
)


@contextlib.contextmanager
def use_drawn(host_draws: HostDraws | None, arrays: Sequence[jax.Array] = ()) -> Iterator[None]:
    """Within the block, lowerings of random ops give what the host has drawn; None: they draw in the program."""
    token = _DRAWN.set(None if host_draws is None else (host_draws, arrays))
    try:
        yield
    finally:
        _DRAWN.reset(token)


def are_drawn_before() -> bool:
    """Whether the host has drawn the numbers of the graph that is being lowered."""
    return _DRAWN.get() is not None


def drawn_before(op: torch._ops.OpOverload, args: Sequence[Any]) -> jax.Array | None:
    """The numbers of a random op's node, of its size; None where they are drawn in the program."""
    found = _DRAWN.get()
    if found is None or (draw := HostDraw.of(op, args)) is None:
        return None
    return found[0].number(found[1], draw, args[-1])
