"""Run a loop over layers on the stages of a mesh: microbatches go from stage to stage.

``shard_map`` over the axis ``stage`` alone: in it each stage has the layers of its own, and the partitioner goes on splitting
what they compute over the other axes. One ``lax.scan`` runs the schedule. In tick ``t`` stage ``s`` computes its chunk of layers
for item ``t - s``: items are the microbatches of the first round, then those of the second, and so on. Between two ticks results
move on to the next stage by collective-permute, from the last one to the first for the next round. A loop in reverse, of a
backward pass, begins at the last stage.

Outside of the loop rows are split over stages, too. So microbatches are dealt out to them: what goes in moves to the first stage
as it is needed, in a buffer that turns by one stage for each item, and what comes out of the last stage takes the free places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.fx.node import Node

from xlatrain.bridge.loops.row_rules import Part, Rows, Summed
from xlatrain.bridge.loops.schedule import BodyValue, Carried, Key, LoopConstant, Operand
from xlatrain.bridge.loops.staging import StagedLoop
from xlatrain.mesh.mesh import STAGE_AXIS, batch_axes
from xlatrain.mesh.pipelining import Pipelining

Compute = Callable[[Node, list[Any], int | jax.Array | None], Any]


@dataclass(frozen=True)
class Cut:
    """How rows are cut into microbatches.

    They are in order of ``stages``, in each of ``groups``, the devices of a stage that split rows. A microbatch has a part of the
    rows that lie on one stage, as many of each group, so that they move between stages alone.
    """

    microbatches: int
    stages: int
    groups: int

    def all(self, x: jax.Array, rows: Rows) -> jax.Array:
        """(…, rows, …) → (microbatches, …, rows of one, …)."""
        dim = rows.dim
        parts = jnp.moveaxis(self._apart(x, rows), (dim + 1, dim + 3), (0, 1))
        return parts.reshape(self.microbatches, *x.shape[:dim], -1, *x.shape[dim + 1 :])

    def one(self, x: jax.Array, rows: Rows, number: jax.Array) -> jax.Array:
        """The rows (…, rows of one, …) of a microbatch, given its number."""
        dim, each = rows.dim, self.microbatches // self.stages
        part = lax.dynamic_index_in_dim(self._apart(x, rows), number // each, dim + 1)
        part = lax.dynamic_index_in_dim(part, number % each, dim + 3)
        return part.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])

    def joined(self, parts: jax.Array, rows: Rows) -> jax.Array:
        """(microbatches, …, rows of one, …) → (…, rows, …)."""
        dim, shape, each = rows.dim, parts.shape[1:], self.microbatches // self.stages
        apart = parts.reshape(self.stages, each, *shape[:dim], rows.blocks, self.groups, -1, *shape[dim + 1 :])
        return jnp.moveaxis(apart, (0, 1), (dim + 1, dim + 3)).reshape(*shape[:dim], -1, *shape[dim + 1 :])

    def _apart(self, x: jax.Array, rows: Rows) -> jax.Array:
        dim, each = rows.dim, self.microbatches // self.stages
        return x.reshape(*x.shape[:dim], rows.blocks, self.stages, self.groups, each, -1, *x.shape[dim + 1 :])


@dataclass(frozen=True)
class Emitted:
    """The values that a loop on stages emitted, of all layers.

    Attributes:
        array: (layers, …) in the order of a stack; (layers, microbatches, …) where rows are cut.
        order: the layer at each place.
        rows: where they are in a microbatch; None: nowhere.
        cut: how they are cut.
    """

    array: jax.Array
    order: tuple[int, ...]
    rows: Rows | None
    cut: Cut

    def of_layer(self, layer: int) -> jax.Array:
        """The value of a layer, for all rows."""
        return self._whole(self.array[self.order.index(layer)])

    def all(self) -> jax.Array:
        """(layers, …), in order, for all rows."""
        return jax.vmap(self._whole)(self.array[jnp.argsort(jnp.asarray(self.order))])

    def _whole(self, x: jax.Array) -> jax.Array:
        return x if self.rows is None else self.cut.joined(x[: self.cut.microbatches], self.rows)


class StageRun:
    """The run of one loop.

    Args:
        staged: the loop.
        pipelining: the pipeline.
        mesh: with the stages.
        compute: computes an op.
        findings: takes what the ops find besides.
    """

    def __init__(self, staged: StagedLoop, pipelining: Pipelining, mesh: Mesh, compute: Compute, findings: Any) -> None:
        self._staged, self._pipelining, self._mesh = staged, pipelining, mesh
        self._compute, self._findings = compute, findings
        dealt = pipelining.stages if staged.microbatches % pipelining.stages == 0 else 1
        self._cut = Cut(staged.microbatches, dealt, staged.groups)
        self._period = pipelining.period(staged.microbatches)
        self._chunk = staged.loop.count // pipelining.chunks

    def run(
        self,
        initial: Sequence[jax.Array],
        outside: Mapping[Node, Any],
        sources: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], dict[Key | Carried, Emitted], Mapping[int, jax.Array]]:
        """Run the loop: gives what is carried out of it, what it emitted, and what its ops found.

        Args:
            initial: what is carried in.
            outside: values that are the same for all copies.
            sources: (layers, …) each, in the order of a stack; (layers, microbatches, …) where rows are cut.
        """
        loop = self._staged.loop
        nodes = list(outside)
        arrays = [self._dealt(x) for x in initial]
        by_stage = PartitionSpec(STAGE_AXIS)
        specs = (by_stage, PartitionSpec(), by_stage)
        run = jax.shard_map(
            lambda own, given, stacks: self._stage(own, dict(zip(nodes, given, strict=True)), stacks),
            mesh=self._mesh,
            in_specs=specs,
            out_specs=by_stage,
            axis_names={STAGE_AXIS},
            check_vma=False,
        )
        out, emitted, found = run(arrays, [outside[node] for node in nodes], list(sources))
        final = [self._cut.joined(x[: self._cut.microbatches], Rows(0)) for x in out]
        order = self._pipelining.order(loop.count)
        results = {
            e: Emitted(x, order, part if isinstance(part := self._staged.parts[e], Rows) else None, self._cut)
            for e, x in zip(loop.emitted, emitted, strict=True)
        }
        return final, results, found

    def _dealt(self, x: jax.Array) -> jax.Array:
        """The microbatches (period, rows, …) of what is carried in, dealt out to the stages in equal parts."""
        parts = self._cut.all(x, Rows(0))
        parts = jnp.pad(parts, [(0, self._period - parts.shape[0])] + [(0, 0)] * x.ndim)
        rows = tuple(axis for axis in batch_axes(self._mesh) if axis != STAGE_AXIS)
        spec: list[Any] = [STAGE_AXIS, rows or None if self._cut.groups > 1 else None]
        spec += [PartitionSpec.UNCONSTRAINED] * (parts.ndim - 2)
        return lax.with_sharding_constraint(parts, NamedSharding(self._mesh, PartitionSpec(*spec)))

    # -- on one stage --------------------------------------------------------------------------------------------------

    def _stage(self, held: list[jax.Array], outside: Mapping[Node, Any], sources: list[jax.Array]) -> tuple[Any, Any, Any]:
        """All ticks of one stage.

        Args:
            held: (microbatches of this stage, rows, …) of what is carried.
            outside: values that are the same for all copies.
            sources: (layers of this stage, …), (layers of this stage, microbatches, …) each.
        """
        count, period, rounds = self._pipelining.stages, self._period, self._pipelining.rounds
        reverse, each = self._staged.loop.reverse, period // self._pipelining.stages
        device = lax.axis_index(STAGE_AXIS)
        place = count - 1 - device if reverse else device
        first, last = place == 0, place == count - 1
        ring = [(s, (s + 1) % count) for s in range(count)]
        back = [(b, a) for a, b in ring]
        onward, backward = (back, ring) if reverse else (ring, back)

        def tick(state: Any, t: jax.Array) -> tuple[Any, Any]:
            moving, held, waiting, kept = state
            item = t - place
            turn, index = jnp.clip(item // period, 0, rounds - 1), item % period
            number = (count - 1 - index // each) * each + index % each if reverse else index
            active = (item >= 0) & (item < period * rounds) & (number < self._cut.microbatches)
            number = jnp.minimum(number, self._cut.microbatches - 1)
            slot = t % each
            fresh = [lax.dynamic_index_in_dim(x, slot, keepdims=False) for x in held]
            if rounds > 1:
                again = [lax.dynamic_index_in_dim(x, index, keepdims=False) for x in waiting]
                entering = [jnp.where(turn == 0, new, old) for new, old in zip(fresh, again, strict=True)]
            else:
                entering = fresh
            taken = [jnp.where(first, new, old) for new, old in zip(entering, moving, strict=True)]
            chunk = (rounds - 1 - turn if reverse else turn) * self._chunk
            done, emitted, found = self._layers(taken, outside, sources, chunk, number)
            kept = [
                _kept(part, all_of, new, chunk, number, active)
                for part, all_of, new in zip(map(self._staged.parts.get, self._staged.loop.emitted), kept, emitted, strict=True)
            ]
            found = {one: jnp.where(active, jnp.max(maxima), jnp.zeros((), maxima.dtype)) for one, maxima in found.items()}
            turned = [jnp.where(last, new, lax.ppermute(x, STAGE_AXIS, backward)) for x, new in zip(fresh, done, strict=True)]
            held = [lax.dynamic_update_index_in_dim(x, new, slot, 0) for x, new in zip(held, turned, strict=True)]
            moved = [lax.ppermute(x, STAGE_AXIS, onward) for x in done]
            if rounds > 1:
                arrived = (t - (count - 1)) % period
                waiting = [lax.dynamic_update_index_in_dim(x, new, arrived, 0) for x, new in zip(waiting, moved, strict=True)]
            return (moved, held, waiting, kept), found

        nothing = [jnp.zeros(x.shape[1:], x.dtype) for x in held]
        waiting = [jnp.zeros((period, *x.shape[1:]), x.dtype) for x in held] if rounds > 1 else []
        kept = self._empty(nothing, outside, sources)
        ticks = self._pipelining.ticks(self._staged.microbatches)
        (_, held, _, kept), found = lax.scan(tick, (nothing, held, waiting, kept), jnp.arange(ticks))
        out = [jnp.roll(x, -((count - 1) % each), 0) for x in held]
        kept = [x.astype(dtype) for x, dtype in zip(kept, self._dtypes, strict=True)]
        return out, kept, found

    def _empty(self, moving: list[jax.Array], outside: Mapping[Node, Any], sources: list[jax.Array]) -> list[jax.Array]:
        """Zeros for what all ticks emit; sums of 16-bit numbers are made in float32."""
        zero = jnp.zeros((), jnp.int32)
        shapes = jax.eval_shape(lambda: self._layers(moving, outside, sources, zero, zero)[1])
        self._dtypes = [shape.dtype for shape in shapes]
        own = self._pipelining.rounds * self._chunk
        made = []
        for emitted, shape in zip(self._staged.loop.emitted, shapes, strict=True):
            part = self._staged.parts[emitted]
            rows = (self._cut.microbatches,) if isinstance(part, Rows) else ()
            wide = jnp.promote_types(shape.dtype, jnp.float32) if isinstance(part, Summed) else shape.dtype
            made.append(jnp.zeros((own, *rows, *shape.shape[1:]), wide))
        return made

    def _layers(
        self, carry: list[jax.Array], outside: Mapping[Node, Any], sources: list[jax.Array], chunk: jax.Array, number: jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array], Mapping[int, jax.Array]]:
        """A chunk of layers for one microbatch: what is carried, and of each layer what it emits and finds."""
        loop = self._staged.loop

        def layer(carry: tuple[jax.Array, ...], at: jax.Array) -> tuple[Any, Any]:
            scanned = [lax.dynamic_index_in_dim(x, chunk + at, keepdims=False) for x in sources]
            of_microbatch = [
                lax.dynamic_index_in_dim(x, number, keepdims=False) if cut else x
                for x, cut in zip(scanned, self._staged.cut_sources, strict=True)
            ]
            (carried, out), found = self._findings.of_body(lambda: self._copy(carry, outside, of_microbatch, number))
            return carried, (out, found)

        carry, (emitted, found) = lax.scan(layer, tuple(carry), jnp.arange(self._chunk), reverse=loop.reverse)  # pyright: ignore[reportAssignmentType]
        return list(carry), list(emitted), found

    def _copy(
        self, carry: tuple[jax.Array, ...], outside: Mapping[Node, Any], scanned: list[jax.Array], number: jax.Array
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Compute one copy of the body."""
        loop = self._staged.loop
        inside: dict[Node, Any] = {}

        def value(operand: Operand) -> Any:
            if isinstance(operand, BodyValue):
                return inside[operand.key]
            if isinstance(operand, LoopConstant):
                return outside[operand.node]
            return (carry if isinstance(operand, Carried) else scanned)[operand.index]

        for staged in self._staged.body:
            op = staged.op
            operands = [
                value(operand) if rows is None else self._cut.one(value(operand), rows, number)
                for operand, rows in zip(op.operands, staged.cuts, strict=True)
            ]
            inside[op.key] = self._compute(op.node, operands, value(op.draw) if op.draw else None)
        emitted = tuple(carry[e.index] if isinstance(e, Carried) else inside[e] for e in loop.emitted)
        return tuple(inside[key] for _, key in loop.carries), emitted


def _kept(
    part: Part | None, kept: jax.Array, new: jax.Array, chunk: jax.Array, number: jax.Array, active: jax.Array
) -> jax.Array:
    """Put the values of one tick among those of all: (layers of the stage, …), with dim 1 the microbatches where rows are cut."""
    start = [chunk, number] if isinstance(part, Rows) else [chunk]
    new = new[:, None] if isinstance(part, Rows) else new
    start += [jnp.zeros((), chunk.dtype)] * (kept.ndim - len(start))
    old = lax.dynamic_slice(kept, start, new.shape)
    if isinstance(part, Summed):
        new = old + jnp.where(active, new, jnp.zeros((), new.dtype)).astype(kept.dtype)
    else:
        new = jnp.where(active, new, old)
    return lax.dynamic_update_slice(kept, new, start)
