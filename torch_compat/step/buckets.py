"""A program for batches of several sizes: their tensors are padded to a bucket, and the program is told the true sizes.

Each new size runs the step's Python, as a capture does, so that nothing is guessed of it: where its graph is that of the bucket
but for sizes and numbers, it takes the bucket's program with its own (:mod:`xlatrain.bridge.capture.bounds`). Where that cannot
be, it has a program of its own, and the run report says why.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from torch_compat.step.capture.cached_program import Built
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.capture.session import CaptureSession
from torch_compat.step.capture.step_capture import StepInputs, StepSpec
from torch_compat.step.host.assumptions import Assumptions
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.kept_graphs import KeptGraph
from torch_compat.step.placed_batch import BatchForms, PlacedBatch
from xlatrain.bridge.capture.bounds import Bounds, GraphNumbers
from xlatrain.bridge.capture.capture import Capture, Recording
from xlatrain.bridge.capture.updates import use_updates
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.strides import memory_order
from xlatrain.mesh.mesh import platform, stages

_OWN_PROGRAMS = 2  # sizes of a step that get a program of their own: a batch, and the smaller one that ends a pass
_SMALL = 64  # up to which a size is padded whatever it is; greater ones to twice their size at most
_SAMPLES = 4
_FIRST_AUDIT = 1  # the one after a program's first run

Shapes = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Bucket:
    """The program of batches up to some sizes.

    Attributes:
        step: a captured step whose graph has these sizes and is told the true ones.
        batch: of these sizes.
        changing: for each tensor of the batch the dims whose size is a bound.
        samples: the numbers of steps that it was made for.
        program: that was built of it last.
        texts: what steps left on the host besides what the program computes.
    """

    step: CapturedStep
    batch: PlacedBatch
    changing: tuple[tuple[int, ...], ...]
    samples: list[GraphNumbers]
    program: Any = None
    texts: set[Hashable] = field(default_factory=set)

    @property
    def shapes(self) -> Shapes:
        return tuple(shape for shape, _ in self.batch.form.shapes)

    def holds(self, shapes: Shapes) -> bool:
        """Whether a batch of these shapes fits without being mostly padding."""
        for bound, shape, changing in zip(self.shapes, shapes, self.changing, strict=True):
            for axis, (most, size) in enumerate(zip(bound, shape, strict=True)):
                if size != most if axis not in changing else not 1 <= size <= most <= max(2 * size, _SMALL):
                    return False
        return True

    def audited(self, step: CapturedStep) -> CapturedStep:
        """A step of the bucket; its first audit is stood where another size left the same: ops are compared anyway."""
        text = (step.text, step.reads)
        stood = text in self.texts
        self.texts.add(text)
        return dataclasses.replace(step, audited=max(step.audited, _FIRST_AUDIT)) if stood else step

    def values(self, step: CapturedStep, numbers: GraphNumbers) -> tuple[list[int], list[float]] | None:
        """The numbers with which its program computes a step; None where it does not."""
        bounds = self.step.capture.bounds
        assert bounds is not None
        if not _same_constants(step.capture, self.step.capture) or _checks(step) != _checks(self.step):
            return None
        return bounds.values(numbers)


@dataclass(frozen=True)
class Padding:
    """How a program of a bucket takes the batches of one size.

    Attributes:
        bucket: whose program it is.
        numbers: what it is told.
        forms: places padded batches.
    """

    bucket: Bucket
    numbers: tuple[np.ndarray, np.ndarray]
    forms: BatchForms = field(repr=False)

    @property
    def step(self) -> CapturedStep:
        """The step that the program is of."""
        return self.bucket.step

    def arrays(self, batch: PlacedBatch) -> list[Any]:
        """A batch as the program takes it."""
        return [*self.forms.padded(batch, self.bucket.shapes).arrays, *self.numbers]


def cut(values: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The values that a program of a bucket gave, without what is no part of the tensors."""
    return [
        value if tuple(value.shape) == shape else jax.lax.slice(value, (0,) * len(shape), shape)
        for value, shape in zip(values, shapes, strict=True)
    ]


@dataclass(eq=False)
class _Family:
    """The sizes of one step, for batches that are otherwise alike.

    Attributes:
        samples: give the numbers of the last steps, which a run without further sizes does not need.
    """

    seen: dict[Shapes, None] = field(default_factory=dict)
    samples: deque[Callable[[], GraphNumbers]] = field(default_factory=lambda: deque(maxlen=_SAMPLES + 1))
    buckets: list[Bucket] = field(default_factory=list)
    refused: bool = False


class Buckets:
    """The buckets of a module's steps in one run.

    Args:
        captures: runs the steps' Python.
        forms: places batches.
        mesh: the programs' devices.
        tell: takes a line about a step for the run report.
    """

    def __init__(self, captures: CaptureSession, forms: BatchForms, mesh: Mesh, tell: Callable[[str], None]) -> None:
        self._captures, self._forms, self._mesh, self._tell = captures, forms, mesh, tell
        self._families: dict[Hashable, _Family] = {}

    def forget(self, name: str) -> None:
        """Let go of a step that is no more."""
        for key in [key for key in self._families if key[0] == name]:  # pyright: ignore
            del self._families[key]

    def padding(
        self, name: str, others: Hashable, step: CapturedStep, batch: PlacedBatch, spec: StepSpec, host_values: HostValues
    ) -> Padding | None:
        """The bucket of a step that was captured for a batch; None where it gets a program of its own.

        Args:
            name: of the step.
            others: what else than the batch decides about its program.
            spec: the step.
            host_values: with which it was captured.
        """
        if step.scalars.arrays:  # a bucket would draw more numbers than a batch
            return None
        if stages(self._mesh) > 1:
            return None  # layers of a bucket's program are no loop, which stages need
        if batch.values is None or self._forms.layout.processes > 1 or not self._forms.holds(batch):
            return None
        form = batch.form
        orders = [one and memory_order(one) for one in form.strides]
        kinds = tuple((len(shape), dtype, order) for (shape, dtype), order in zip(form.shapes, orders, strict=True))
        key = (name, others, form.spec, kinds, tuple(step.scalars.outcomes), step.scalars.is_empty)
        family = self._families.setdefault(key, _Family())
        shapes = tuple(shape for shape, _ in form.shapes)
        family.seen[shapes] = None
        if family.refused:
            return None
        family.samples.append(functools.cache(functools.partial(GraphNumbers.of, step.capture)))
        if len(family.seen) <= _OWN_PROGRAMS:
            return None
        *before, numbers = [sample() for sample in family.samples]
        for bucket in sorted((one for one in family.buckets if one.holds(shapes)), key=_volume):
            found = bucket.values(step, numbers)
            if found is None and len(bucket.samples) < _SAMPLES:
                found = self._widened(bucket, step, numbers)
            if found is not None:
                return self._padding(bucket, found)
        try:
            bucket = self._made(
                name,
                family,
                shapes,
                step,
                [*(one for one in before if one.rest == numbers.rest), numbers],
                batch,
                spec,
                host_values,
            )
        except Exception as error:  # whatever it is, the step itself has been captured
            family.refused = True
            self._tell(
                f"{name}: each size has a program of its own: {str(error).strip().splitlines()[0] if str(error) else type(error)}"
            )
            return None
        family.buckets.append(bucket)
        found = bucket.values(step, numbers)
        assert found is not None
        return self._padding(bucket, found)

    def note_built(self, padding: Padding, built: Built) -> Built:
        """Note the program of a bucket; one that is there already is not compiled again."""
        bucket = padding.bucket
        known = bucket.program is built.program
        if bucket.program is not None and not known:  # nothing says whether one serves for all: do not go on like this
            for family in self._families.values():
                family.refused = family.refused or bucket in family.buckets
        bucket.program = built.program
        return built._replace(compiled=built.compiled or known)

    def _padding(self, bucket: Bucket, found: tuple[list[int], list[float]]) -> Padding:
        return Padding(bucket, (np.asarray(found[0], np.int32), np.asarray(found[1], np.float32)), self._forms)

    def _made(
        self,
        name: str,
        family: _Family,
        shapes: Shapes,
        step: CapturedStep,
        samples: list[GraphNumbers],
        batch: PlacedBatch,
        spec: StepSpec,
        host_values: HostValues,
    ) -> Bucket:
        """A bucket for the sizes seen until now; the last of ``samples`` are the numbers of ``step``.

        Raises:
            Exception: the step does something else for larger sizes, or an op has no rule.
        """
        largest = [tuple(max(sizes) for sizes in zip(*of_leaf, strict=True)) for of_leaf in zip(*family.seen, strict=True)]
        smallest = [tuple(min(sizes) for sizes in zip(*of_leaf, strict=True)) for of_leaf in zip(*family.seen, strict=True)]
        changing = tuple(
            tuple(axis for axis, (low, high) in enumerate(zip(lows, highs, strict=True)) if low != high)
            for lows, highs in zip(smallest, largest, strict=True)
        )
        bounds = tuple(
            tuple(
                self._bound(size, high[axis], _times(family, leaf, axis)) if axis in axes else size
                for axis, size in enumerate(shape)
            )
            for leaf, (shape, high, axes) in enumerate(zip(shapes, largest, changing, strict=True))
        )
        padded = self._forms.padded(batch, bounds)
        if padded.form.rows.is_padded:
            raise ValueError("its rows do not divide the mesh")
        outcomes = None if host_values.assumptions is None else Assumptions(forced=step.scalars.outcomes)

        def inputs(host_values: HostValues) -> StepInputs:
            return dataclasses.replace(spec.inputs(host_values), leaves=padded.form.leaves(), graphs=None)

        graph = self._captures.graph(
            name, dataclasses.replace(spec, inputs=inputs), dataclasses.replace(host_values, assumptions=outcomes)
        )
        numbers = samples[-1]
        used = [one for one in (samples, samples[-1:]) if Bounds.of(graph, one) is not None]
        found = Bounds.of(graph, used[0]) if used else None
        if found is None:
            raise ValueError(f"it does something else for {', '.join(f'{one}' for one in bounds)}")
        made = Bucket(self._bounded(step, graph, found), padded, changing, list(used[0]))
        if made.values(step, numbers) is None:
            raise ValueError("it uses other tensors from outside of it, or other indices, for other sizes")
        self._tell(f"{name}: one program for sizes up to {', '.join(map(str, bounds))}")
        return made

    def _widened(self, bucket: Bucket, step: CapturedStep, numbers: GraphNumbers) -> tuple[list[int], list[float]] | None:
        """The numbers of a step in a bucket in which more may change than until now; None where that is no help."""
        found = Bounds.of(bucket.step.capture, [*bucket.samples, numbers])
        if found is None:
            return None
        try:
            bounded = self._bounded(step, bucket.step.capture, found)
        except Exception:  # as it was it is of use
            return None
        before = bucket.step
        bucket.step, bucket.program = bounded, None
        bucket.samples.append(numbers)
        values = bucket.values(step, numbers)
        if values is None:
            bucket.step = before
        return values

    def _bounded(self, step: CapturedStep, graph: Capture, bounds: Bounds) -> CapturedStep:
        """``step`` with a graph of larger sizes.

        Raises:
            LoweringError: an op has no rule.
        """
        graph = dataclasses.replace(graph, bounds=bounds)
        self._try_out(graph)
        return dataclasses.replace(step, recording=Recording(lambda: graph), kept=KeptGraph(graph, ()))

    def _try_out(self, graph: Capture) -> None:
        """Trace a graph's program once, on shapes: whatever has no rule is found before it is needed."""
        mesh = self._mesh
        run = lower(graph, platform=platform(mesh), partitioned=mesh.devices.size > 1, mesh=mesh)
        inputs = [jax.ShapeDtypeStruct(spec.shape, jax_dtype(spec.dtype)) for spec in graph.inputs]
        counts = [sum(one.whole is whole for one in graph.bounds.positions) for whole in (True, False)]  # pyright: ignore
        numbers = (jax.ShapeDtypeStruct((counts[0],), np.int32), jax.ShapeDtypeStruct((counts[1],), np.float32))
        with use_updates(lambda call, params, grads, skip: list(params)):
            outputs = jax.eval_shape(lambda given, found: run(given, jax.random.key(0), None, found), inputs, numbers)
        free = {output.index for output in graph.result["values"]}
        sizes = graph.bounds.sizes  # pyright: ignore
        nodes: Any = graph.graph.graph.output_node().args[0]
        if any(any(sizes[node][0]) for place, node in enumerate(nodes[: len(outputs)]) if place not in free and sizes[node]):
            raise ValueError("a gradient, buffer or counter has a size that changes")

    def _bound(self, size: int, largest: int, times: int) -> int:
        """The bound of a size: in coarse steps some more than the largest seen, but for sizes much below that.

        Args:
            times: how many sizes of batches have the largest; of two it is taken for a limit.
        """
        wanted = min(largest if times > 1 else largest + largest // 4, max(size + size // 2, _SMALL))
        step = math.lcm(max(8, 2 ** (wanted.bit_length() - 3)), self._forms.layout.count)
        exact = wanted == largest and largest % self._forms.layout.count == 0
        return wanted if exact else -(-wanted // step) * step


def _times(family: _Family, leaf: int, axis: int) -> int:
    """How many of the sizes seen have the largest of a dim."""
    sizes = [shapes[leaf][axis] for shapes in family.seen]
    return sizes.count(max(sizes))


def _volume(bucket: Bucket) -> int:
    return sum(math.prod(shape) for shape in bucket.shapes)


def _same_constants(one: Capture, other: Capture) -> bool:
    pairs = zip(one.constants.items(), other.constants.items(), strict=True)
    same_number = len(one.constants) == len(other.constants)
    return same_number and all(
        a == b and x.dtype == y.dtype and (x is y or (x.shape == y.shape and torch.equal(x, y))) for (a, x), (b, y) in pairs
    )


def _checks(step: CapturedStep) -> list[tuple[int, str]]:
    """Where a program looks for indices out of range: what it finds is told by the number of the check."""
    places = {node: place for place, node in enumerate(step.capture.graph.graph.nodes)}
    return [(places[check.node], check.index.op) for check in step.index_checks]
