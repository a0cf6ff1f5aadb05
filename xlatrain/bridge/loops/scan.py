"""Run a rolled-up loop of a captured graph under ``lax.scan``.

On CPU what a loop scans and emits in 16-bit floats goes in and out as integers of the same bits. XLA:CPU cuts and updates slices
of such arrays in float32 only: it would keep a float32 copy of each stack, and convert all of it in every iteration. What is
scanned becomes integers inside of the loop, where one fused op does it for the slice alone: no copy of the stack is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from torch.fx.node import Node

from xlatrain.bridge.loops.pipeline import Emitted, StageRun
from xlatrain.bridge.loops.schedule import (
    BodyValue,
    Carried,
    Draws,
    Key,
    Loop,
    LoopConstant,
    Operand,
    ScanOutput,
    Schedule,
    Source,
    constants_of,
    is_final_carry,
    used_whole,
)
from xlatrain.bridge.loops.staging import Staged
from xlatrain.step.stacking import Row, common_stack


@dataclass(frozen=True)
class _Part:
    """The rows of an array (copies, …) from ``start`` on that a loop scans, backwards if ``flip``.

    Each is cut where it is used: as an array of their own XLA would copy all of them.
    """

    array: jax.Array
    start: int
    count: int
    flip: bool

    def row(self, copy: jax.Array) -> jax.Array:
        """The row of a copy, int32 scalars."""
        return self.start + self.count - 1 - copy if self.flip else self.start + copy


Compute = Callable[[Node, list[Any], int | jax.Array | None], Any]
"""``(op, values in place of its nodes, number of its random draw or None) -> result``."""


class LoopFindings(Protocol):
    """Findings of ops besides their results, numbers by a key each; in a loop's body they belong to its trace."""

    def of_body(self, body: Callable[[], Any], /) -> tuple[Any, dict[int, jax.Array]]: ...

    def note_loop(self, found: Mapping[int, jax.Array], /) -> None: ...


class Values:
    """The values of a graph's nodes while it runs.

    Args:
        schedule: what runs.
        platform: of the devices.
        found: takes what the ops find besides; a loop gives what it found after all of its copies.
        staged: which loops run on the stages of ``mesh``.
    """

    def __init__(
        self,
        schedule: Schedule,
        platform: str | None,
        found: LoopFindings,
        staged: Staged | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._found = found
        self._staged, self._mesh = staged, mesh
        self._schedule = schedule
        self._as_integers = platform == "cpu"
        self._known: dict[Node, Any] = {}
        self._cut: dict[Node, Any] = {}
        self._final: dict[Loop, tuple[Any, ...]] = {}
        self._emitted: dict[Loop, Mapping[Key | Carried, jax.Array | Emitted]] = {}
        self._stacks: dict[tuple[Node, ...], jax.Array] = {}

    def __setitem__(self, node: Node, value: Any) -> None:
        self._known[node] = value

    def __getitem__(self, node: Node) -> Any:
        node = self._schedule.same_as.get(node, node)
        value = self.row(node)
        if isinstance(value, Row):  # it stays a row: its stack may be needed
            if node not in self._cut:
                self._cut[node] = value.array()
            return self._cut[node]
        return value

    def row(self, node: Node) -> Any:
        """The value of a node, as a :class:`Row` where it is in a stack: what needs the stack then need not make it."""
        node = self._schedule.same_as.get(node, node)
        if node not in self._known:
            self._known[node] = self._rolled_up(node)
        return self._known[node]

    def _rolled_up(self, node: Node) -> Any:
        """The value of one copy's node, after its loop."""
        place = self._schedule.places[node]
        if is_final_carry(place):
            number = next(i for i, (_, key) in enumerate(place.loop.carries) if key is place.key)
            return self._final[place.loop][number]
        emitted, index = self._emitted[place.loop][place.key], place.loop.index(place.copy)
        if not isinstance(emitted, Emitted):
            return Row(emitted, index)
        return emitted.of_layer(index) if emitted.rows else Row(emitted.array, emitted.order.index(index))

    def run(self, loop: Loop, compute: Compute) -> None:
        """Run a loop; afterwards its nodes have values."""
        outside = {node: self[node] for node in used_whole(loop)}  # taken here: what the body makes stays in the body
        if self._staged is not None and loop in self._staged.loops:
            self._run_on_stages(loop, outside, compute)
            return

        sources = [self._array(source) for source in loop.scanned]
        emitted_dtypes: list[Any] = []

        def copy_of_body(carry: tuple[Any, ...], slices: tuple[Any, list[Any]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            inside: dict[Node, Any] = {}
            copy, parts = slices
            scanned = [
                self._cut_from(source, copy) if part is None else part for source, part in zip(sources, parts, strict=True)
            ]

            def value(operand: Operand) -> Any:
                if isinstance(operand, BodyValue):
                    return inside[operand.key]
                if isinstance(operand, LoopConstant):
                    return outside[operand.node]
                return (carry if isinstance(operand, Carried) else scanned)[operand.index]

            for op in loop.body:
                draw = value(op.draw) if op.draw else None
                inside[op.key] = compute(op.node, [value(operand) for operand in op.operands], draw)
            emitted = [carry[e.index] if isinstance(e, Carried) else inside[e] for e in loop.emitted]
            emitted_dtypes[:] = [value.dtype for value in emitted]
            out = [_with_dtype(value, jnp.uint16) if self._as_integer(value) else value for value in emitted]
            return tuple(inside[key] for _, key in loop.carries), tuple(out)

        def body(carry: tuple[Any, ...], slices: tuple[Any, list[Any]]) -> tuple[tuple[Any, ...], Any]:
            (carried, out), found = self._found.of_body(lambda: copy_of_body(carry, slices))
            return carried, (out, found)

        initial = tuple(outside[init] for init, _ in loop.carries)
        is_cut = [isinstance(source, _Part) or self._as_integer(source) for source in sources]
        scanned = jnp.arange(loop.count), [None if cut else source for source, cut in zip(sources, is_cut, strict=True)]
        final, (emitted, found) = lax.scan(body, initial, scanned, length=loop.count, reverse=loop.reverse)
        self._found.note_loop(found)
        self._final[loop] = final
        stacks = [_with_dtype(stack, dtype) for stack, dtype in zip(emitted, emitted_dtypes, strict=True)]
        self._emitted[loop] = dict(zip(loop.emitted, stacks, strict=True))

    def _run_on_stages(self, loop: Loop, outside: dict[Node, Any], compute: Compute) -> None:
        assert self._staged is not None and self._mesh is not None
        staged, pipelining = self._staged.loops[loop], self._staged.pipelining
        order = pipelining.order(loop.count)

        def source_array(source: Source) -> jax.Array:
            if isinstance(source, Draws):
                return jnp.asarray([source.numbers[layer] for layer in order], jnp.int32)
            if isinstance(source, ScanOutput):
                emitted = self._emitted[source.loop][source.value]
                return emitted.array if isinstance(emitted, Emitted) else emitted[jnp.asarray(order)]
            stack = common_stack([self.row(source.nodes[layer]) for layer in order])
            return jnp.stack([self[source.nodes[layer]] for layer in order]) if stack is None else stack

        run = StageRun(staged, pipelining, self._mesh, compute, self._found)
        initial = [outside[init] for init, _ in loop.carries]
        constants = {node: outside[node] for op in loop.body for node in constants_of(op)}
        final, emitted, found = run.run(initial, constants, [source_array(source) for source in loop.scanned])
        self._final[loop], self._emitted[loop] = tuple(final), emitted
        self._found.note_loop(found)

    def _as_integer(self, array: jax.Array) -> bool:
        """Whether the array is scanned as integers of its bits: 16-bit floats, where XLA would widen them."""
        return self._as_integers and array.dtype in (jnp.bfloat16, jnp.float16)

    def _cut_from(self, source: jax.Array | _Part, copy: jax.Array) -> jax.Array:
        """The row of a scanned array that belongs to a copy, inside of the loop."""
        array, row = (source.array, source.row(copy)) if isinstance(source, _Part) else (source, copy)
        if self._as_integer(array):
            return _cut_as_integers(array, row)
        return lax.dynamic_index_in_dim(array, row, keepdims=False)

    def _array(self, source: Source) -> jax.Array | _Part:
        """The array (copies, …) that a loop scans for ``source``; a stack as it is stored, if there is one."""
        if isinstance(source, Draws):
            return jnp.asarray(source.numbers, jnp.int32)
        if isinstance(source, ScanOutput):
            return self._slice(source)
        if source.nodes not in self._stacks:
            stack = common_stack([self.row(node) for node in source.nodes])
            self._stacks[source.nodes] = jnp.stack([self[node] for node in source.nodes]) if stack is None else stack
        return self._stacks[source.nodes]

    def _slice(self, source: ScanOutput) -> jax.Array | _Part:
        """The part (count, …) of an earlier loop's output."""
        emitted = self._emitted[source.loop][source.value]
        array = emitted.all() if isinstance(emitted, Emitted) else emitted
        if source.count != source.loop.count:
            return _Part(array, source.start, source.count, source.flip)
        return jnp.flip(array, 0) if source.flip else array


def _cut_as_integers(stack: jax.Array, index: jax.Array) -> jax.Array:
    """Row ``index`` (int32 scalar) of a stack of 16-bit floats (copies, …), cut as integers of the same bits."""
    return _with_dtype(lax.dynamic_index_in_dim(_with_dtype(stack, jnp.uint16), index, keepdims=False), stack.dtype)


def _with_dtype(array: jax.Array, dtype: Any) -> jax.Array:
    """The same bits as ``dtype``."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)
