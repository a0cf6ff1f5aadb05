"""The compiled executor: runs a module's steps as XLA programs over a mesh.

A *variant* is one captured and compiled form of a step. Which one a batch needs depends on the batch's structure and shapes and
on what the host changed since (``training`` flags, ``requires_grad``, attributes, optimizer flags).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import torch.utils._pytree as pytree
from jax.sharding import Mesh

from torch_compat.functional.batches import BatchSpec, flatten_batch
from torch_compat.functional.effects import EffectRecorder
from torch_compat.functional.gradients import VisibleGradients
from torch_compat.functional.guards import HostGuards
from torch_compat.functional.host_arrays import host_value
from torch_compat.functional.host_scalars import Env, ScalarTracer
from torch_compat.functional.model_state import ModelState
from torch_compat.functional.recording import LogEntry
from torch_compat.functional.step import (
    BatchPlace,
    CapturedStep,
    CounterPlace,
    ScalarPlace,
    StepInputs,
    TraceContext,
    ValuePlace,
    capture_evaluation_step,
    capture_training_step,
)
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.host import as_numpy, from_numpy
from xlatrain.bridge.live import lazy_tensor
from xlatrain.data import BatchPlacer
from xlatrain.loss_scale import LossScaler
from xlatrain.precision import matmul_precision
from xlatrain.rows import Rows
from xlatrain.step import GradientFunction, GradientOutput, StepBuilder, UpdateFunction

_IN_FLIGHT = 8  # programs dispatched ahead of the device: many sharded programs in flight can deadlock XLA:CPU
_AUDITED_RUNS = frozenset({1, 16, 128, 1024, 8192, 65536})
_WARN_VARIANTS = 8
_MAX_VARIANTS = 64


UserStep = Callable[[Any, ScalarTracer], Any]
"""Calls the user's method with a batch and the tracer's counters."""


class ImpureStepError(CaptureError):
    """The step's Python does something else from one batch to the next, in a way that a compiled step cannot follow."""


class PlacedBatch(NamedTuple):
    """A batch on the mesh.

    Attributes:
        arrays: one per tensor of the batch; global, dim 0 padded to divide the mesh.
        spec: puts tensors back into the user's batch.
        rows: which rows are real.
        split: for each array whether dim 0 is split over the mesh.
        shapes: global shape (real rows only) and torch dtype of each tensor.
    """

    arrays: list[Any]
    spec: BatchSpec
    rows: Rows
    split: tuple[bool, ...]
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def size(self) -> int:
        """Rows of the global batch."""
        return self.rows.size

    def key(self) -> Hashable:
        """What a program depends on."""
        return self.shapes, self.rows, self.split, self.spec, tuple(map(_number, self.spec.others))

    def describe(self) -> str:
        names = self.spec.names()
        return ", ".join(
            f"{name}: {str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"
            for name, (shape, dtype) in zip(names, self.shapes, strict=True)
        )


@dataclass
class StepOutcome:
    """What an executed step gave the host; values stay on the device until they are read.

    Attributes:
        logs: what it logged.
        packed: the logged values, float32[n].
        make_result: gives :attr:`result`.
        batch_size: rows of the global batch.
    """

    logs: Sequence[LogEntry]
    packed: Any
    make_result: Callable[[], Any]
    batch_size: int

    @functools.cached_property
    def result(self) -> Any:
        """What the user's method returned, with lazily read tensors; built when somebody asks."""
        return self.make_result()


@dataclass
class Variant:
    """One captured and compiled form of a step."""

    step: CapturedStep
    program: Callable[..., Any]
    runs: int = 0
    constants: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    rebound: frozenset[tuple[str, str]] = frozenset()

    def fits(self, env: Env) -> bool:
        """Whether the host is as the capture assumed: the loop's counters, and tensors that it baked in."""
        return self.step.scalars.holds(env) and all(tensor._version == version for tensor, version in self.constants)


@dataclass(frozen=True)
class StepServices:
    """What the executor needs of its surroundings.

    Attributes:
        roots: name → object whose Python side effects are followed (module, callbacks, datamodule).
        trace: what surrounds the user's Python during a capture.
        convert: the precision plugin's conversion of batch tensors.
        compiling: told True while a program is made, False afterwards.
    """

    roots: Mapping[str, Any]
    trace: TraceContext
    convert: Callable[[torch.Tensor], torch.Tensor]
    compiling: Callable[[bool], None]


@dataclass
class CompileLog:
    """Counts what was compiled and for how long, for the run report."""

    variants: int = 0
    seconds: float = 0.0
    steps: int = 0


class CompiledSteps:
    """Runs the training and evaluation steps of one module on one mesh."""

    executor = "compiled"

    def __init__(
        self, module: torch.nn.Module, model: ModelState, mesh: Mesh, placer: BatchPlacer, services: StepServices
    ) -> None:
        self.module = module
        self.model = model
        self.mesh = mesh
        self.log = CompileLog()
        self.copy_batches = False
        self._placer = placer
        self._services = services
        self._effects = EffectRecorder(services.roots)
        self._guards = HostGuards(module, services.roots)
        self._variants: dict[Hashable, list[Variant]] = {}

        self._in_flight: deque[Any] = deque()
        self._flags_seen = -1
        self._flags: tuple[bool, ...] = ()
        self._update: UpdateFunction | None = None
        self._scaler: LossScaler | None = None
        self._apply: Callable[..., Any] | None = None
        self._evaluations = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around a whole run: what the host assigns to modules is followed."""
        with self._guards.following():
            yield

    def set_update(self, update: UpdateFunction, scaler: LossScaler | None) -> None:
        """Give the training programs their clipping and optimizer, and their loss scaling."""
        self._scaler = scaler
        self._update = update
        self._apply = None

    # -- batches ---------------------------------------------------------------------------------------------------

    def place(self, batch: Any) -> PlacedBatch:
        """Put this process's rows of a batch on the mesh.

        Raises:
            OverflowError: an int64 value that does not fit int32, named by the leaf.
        """
        leaves, spec = flatten_batch(batch)
        convert = self._services.convert
        leaves = [convert(leaf) for leaf in leaves]
        hosts = [as_numpy(leaf) for leaf in leaves]
        if self.copy_batches:
            hosts = [host.copy() for host in hosts]
        arrays, rows, split = self._placer.place(hosts, names=spec.names)
        shapes = [
            ((rows.size, *host.shape[1:]) if cut else host.shape, leaf.dtype)
            for host, leaf, cut in zip(hosts, leaves, split, strict=True)
        ]
        return PlacedBatch(arrays, spec, rows, split, tuple(shapes))

    # -- training --------------------------------------------------------------------------------------------------

    def train(
        self, batch: PlacedBatch, mode: str, accumulate: int, hyper: Any, static: Hashable, env: Env, call: UserStep
    ) -> StepOutcome:
        """Run one training step.

        Args:
            mode: ``"fused"`` (gradients and update), ``"accumulate"`` (gradients are added up), or ``"split"`` (gradients
                leave the program as ``model.grads``, for :meth:`apply` after the hooks have seen them).
            accumulate: what the loss is divided by.
            hyper: the optimizer's numeric options, an input of the program.
            static: what else decides about the program (optimizer flags).
            env: the loop's counters.
            call: ``(batch, tracer) -> result``, the user's ``training_step``.
        """

        def recapture() -> CapturedStep:
            inputs = self._inputs(batch, env, call, scales_loss=self._scaler is not None)
            return capture_training_step(self.module, inputs, self._effects, self._services.trace, accumulate=accumulate)

        build = self._training_program(mode, batch)
        variant = self._variant("training_step", (mode, accumulate, static), batch, env, recapture, build)
        state = self.model.state
        extra = (hyper,) if mode == "fused" else ()
        new, out = self._run(variant, state, batch.arrays, variant.step.scalars.inputs(env), *extra)
        outputs = out
        if mode == "fused":
            outputs, _ = out
        elif mode == "split":
            grads, outputs = out
            self.model.grads = VisibleGradients(grads, new.params)
        self.model.advance(new)
        self.log.steps += 1
        return self._outcome(variant, batch, outputs, env)

    def apply(self, hyper: Any) -> None:
        """Update the parameters with the gradients as the hooks left them; afterwards they are gone."""
        assert self.model.grads is not None
        self.model.push_writes()
        grads, self.model.grads = self.model.grads.arrays(), None
        if self._apply is None:
            self._apply = self._builder(draws=False).apply()
        state, _ = self._apply(self.model.state, grads, hyper)
        self.model.advance(state)

    def keep_gradients(self) -> None:
        """The gradients as the hooks left them wait for the next batch of the accumulation window."""
        assert self.model.grads is not None
        grads, self.model.grads = self.model.grads.arrays(), None
        accumulated = {name: grad for name, grad in grads.items() if grad is not None}
        self.model.state = dataclasses.replace(self.model.state, accumulated=accumulated)

    def _builder(self, draws: bool) -> StepBuilder:
        assert self._update is not None
        return StepBuilder(self.mesh, _in_matmul_precision(self._update), self.model.shardings, self._scaler)

    def _training_program(self, mode: str, batch: PlacedBatch) -> Callable[[CapturedStep], Callable[..., Any]]:
        def build(step: CapturedStep) -> Callable[..., Any]:
            builder = self._builder(step.capture.uses_random)
            make = {"fused": builder.fused, "accumulate": builder.accumulate, "split": builder.split}[mode]
            return make(_in_matmul_precision(_on_real_rows(step.gradient_function(), batch)))

        return build

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, name: str, batch: PlacedBatch, static: Hashable, env: Env, call: UserStep) -> StepOutcome:
        """Run one validation, test or predict step.

        Args:
            name: of the method.
            static: what else decides about the program (the index of the dataloader).
            env: the loop's counters.
            call: ``(batch, tracer) -> result``, the user's method.
        """

        def recapture() -> CapturedStep:
            return capture_evaluation_step(self.module, self._inputs(batch, env, call), self._effects, self._services.trace)

        variant = self._variant(name, static, batch, env, recapture, lambda step: _evaluation_program(step, batch))
        self._evaluations += 1
        state, scalars = self.model.state, variant.step.scalars.inputs(env)
        draws = np.int32(-self._evaluations)
        buffers, outputs = self._run(variant, state.params, state.buffers, state.key, draws, batch.arrays, scalars)
        if buffers:
            self.model.advance(dataclasses.replace(state, buffers={**state.buffers, **buffers}))
        return self._outcome(variant, batch, outputs, env)

    # -- variants --------------------------------------------------------------------------------------------------

    def _variant(
        self,
        name: str,
        static: Hashable,
        batch: PlacedBatch,
        env: Env,
        recapture: Callable[[], CapturedStep],
        build: Callable[[CapturedStep], Callable[..., Any]],
    ) -> Variant:
        """The variant for this batch and these host values; captured and built if there is none yet."""
        self.model.push_writes()
        fixed = (name, static, self._trainable(), batch.key())
        for variant in self._variants.get((fixed, self._guards.key(name)), ()):
            if variant.fits(env):
                if variant.runs in _AUDITED_RUNS:
                    self._audit(name, variant, recapture)
                return variant
        with self._compiling():
            step = self._capture(name, recapture)
            variant = Variant(step, build(step))
            variant.rebound = step.effects.attributes(rebound=True)
            self._check_rewritten(name, fixed, step, variant.rebound)
            variant.constants = [(tensor, tensor._version) for tensor in step.capture.constants.values()]
        self._variants.setdefault((fixed, self._guards.key(name)), []).append(variant)
        self._count(name, batch)
        return variant

    def _capture(self, name: str, recapture: Callable[[], CapturedStep]) -> CapturedStep:
        before = _host_random_state()
        try:
            with self._guards.capturing(name), matmul_precision(torch.get_float32_matmul_precision()):
                step = recapture()
        finally:
            drawn = _restore_host_random_state(before)
        if drawn:
            raise ImpureStepError(
                f"{name} draws from Python's or numpy's random generator, which a compiled step would do only once. Draw with "
                "torch (torch.rand, …) in the step, or draw in a hook or in the dataset"
            )
        return step

    def _check_rewritten(self, name: str, fixed: Hashable, step: CapturedStep, rebound: frozenset[tuple[str, str]]) -> None:
        """Refuse a step that carries state from one batch to the next in attributes.

        A flag that is set once makes two variants; more show that the value changes all the time.
        """
        self._guards.note_rewritten(name, step.effects.attributes())
        both = self._guards.reads_before(name, rebound)
        place = self._guards.holds_constant(name, list(step.capture.constants.values()))
        count = sum(len(some) for key, some in self._variants.items() if key[0] == fixed)  # pyright: ignore[reportIndexIssue]
        if place is None and not (both and count >= 2):
            return
        raise ImpureStepError(
            f"{name} reads {place or ', '.join(both)} and changes it for the next batch, which is not a part of the compiled "
            "step's state. Keep it in a buffer (self.register_buffer), or change it in a hook such as on_train_batch_end; or run "
            "eagerly (XLATRAIN_EXECUTOR=eager)."
        )

    def _audit(self, name: str, variant: Variant, recapture: Callable[[], CapturedStep]) -> None:
        """Capture once more with today's host values: a pure step gives the same graph, logs and side effects."""
        again = self._capture(name, recapture)
        if again.fingerprint != variant.step.fingerprint:
            error = ImpureStepError(
                f"{name} does not do the same for every batch, so it cannot be compiled as it is:\n"
                f"{_difference(variant.step.fingerprint, again.fingerprint)}\n"
                "A compiled step runs its Python once per variant. Look for host values that change from step to step (counters, "
                "time, random numbers from random or numpy, batch_idx or global_step in arithmetic); keep them in tensors "
                "(register_buffer), or move that part to a hook such as on_train_batch_end; or run eagerly "
                "(XLATRAIN_EXECUTOR=eager)."
            )
            error.recoverable = variant.runs == 1  # the one step that ran did so with its own host values
            raise error

    def _count(self, name: str, batch: PlacedBatch) -> None:
        self.log.variants += 1
        count = sum(len(some) for key, some in self._variants.items() if key[0][0] == name)  # pyright: ignore[reportIndexIssue]
        if count == _WARN_VARIANTS:
            rank_zero_warn(
                f"{name} was compiled {count} times in this run; the last time for {batch.describe()}. Every new shape, "
                "and every "
                "change of a host value that the step reads, is compiled again: pad batches to few lengths, drop the last batch "
                "(drop_last=True)."
            )
        if count > _MAX_VARIANTS:
            raise ImpureStepError(
                f"{name} needed more than {_MAX_VARIANTS} compiled variants; the last one for {batch.describe()}. "
                "A host value that the step reads changes all the time, or the batches' shapes do: pad the batches to "
                "few lengths, and "
                "keep changing values in tensors."
            )

    def _trainable(self) -> tuple[bool, ...]:
        """``requires_grad`` of every parameter, read again only after one was set."""
        if self._flags_seen != self.model.live.flags_changed:
            self._flags = self.model.requires_grad()
            self._flags_seen = self.model.live.flags_changed
        return self._flags

    def _inputs(self, batch: PlacedBatch, env: Env, call: UserStep, *, scales_loss: bool = False) -> StepInputs:
        leaves = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in batch.shapes]
        return StepInputs(self.model.params, self.model.buffers, leaves, batch.spec, call, env, scales_loss)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        start = time.perf_counter()
        self._services.compiling(True)
        try:
            yield
        finally:
            self._services.compiling(False)
            self.log.seconds += time.perf_counter() - start

    # -- running ---------------------------------------------------------------------------------------------------

    def _run(self, variant: Variant, *args: Any) -> Any:
        variant.runs += 1
        if variant.runs > 1:
            return variant.program(*args)
        with self._compiling():
            return variant.program(*args)

    def _outcome(self, variant: Variant, batch: PlacedBatch, outputs: Any, env: Env) -> StepOutcome:
        packed, _ = outputs
        self._in_flight.append(packed)
        if len(self._in_flight) > _IN_FLIGHT:
            for _ in range(_IN_FLIGHT // 2):  # several at a time: a wait costs a few µs even where nothing is to be waited for
                oldest = self._in_flight.popleft()
            oldest.block_until_ready()
        step = variant.step
        fill = _Filler(step, outputs, batch, self._placer, env)
        if step.effects:
            step.effects.replay(self._effects.roots, fill)
            self._guards.note_replayed(variant.rebound)
        return StepOutcome(step.logs, packed, lambda: fill(step.result.tree), batch.rows.size)


class _Filler:
    """Puts lazily read tensors of one executed step into recorded values."""

    def __init__(
        self, step: CapturedStep, outputs: tuple[Any, Sequence[Any]], batch: PlacedBatch, placer: BatchPlacer, env: Env
    ) -> None:
        self._env = env
        self._specs = step.value_specs
        self._packed, self._values = outputs
        self._batch = batch
        self._layout = placer.layout
        self._made: dict[int, torch.Tensor] = {}

    def __call__(self, tree: Any) -> Any:
        return pytree.tree_map_only((ValuePlace, ScalarPlace, CounterPlace, BatchPlace), self._value, tree)

    def _value(self, place: ValuePlace | ScalarPlace | CounterPlace | BatchPlace) -> Any:
        if isinstance(place, ValuePlace):
            return self._tensor(place.index)
        if isinstance(place, ScalarPlace):
            packed, index = self._packed, place.index
            return lazy_tensor((), torch.float32, lambda: torch.tensor(host_value(packed)[index]))
        return place.expression(self._env) if isinstance(place, CounterPlace) else self._batch.spec.others[place.index]

    def _tensor(self, index: int) -> torch.Tensor:
        if index not in self._made:
            spec, array = self._specs[index], self._values[index]
            rows = self._local_rows(spec.shape)
            shape = spec.shape if rows is None else (len(rows), *spec.shape[1:])
            self._made[index] = lazy_tensor(shape, spec.dtype, lambda: _fetch(array, spec.dtype, rows))
        return self._made[index]

    def _local_rows(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """On several processes, this process's rows of a value that has one row per sample."""
        if self._layout.processes == 1 or not shape or shape[0] != self._batch.rows.size:
            return None
        return self._layout.own_rows(self._batch.rows)


def _fetch(array: jax.Array, dtype: torch.dtype, rows: np.ndarray | None) -> torch.Tensor:
    host = host_value(array)
    tensor = from_numpy(np.array(host if rows is None else host[rows]))
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _on_real_rows(gradients: GradientFunction, batch: PlacedBatch) -> GradientFunction:
    """``gradients`` of a padded batch: the padding is cut off first."""
    rows, split = batch.rows, batch.split
    if not rows.is_padded:
        return gradients

    def on_real_rows(params: Any, buffers: Any, arrays: Any, key: jax.Array, scalars: Any) -> GradientOutput:
        real = [rows.cut(x) if cut else x for x, cut in zip(arrays, split, strict=True)]
        return gradients(params, buffers, real, key, scalars)

    return on_real_rows


def _in_matmul_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` traced under torch's precision of float32 matmuls.

    Inside the program, not around its calls: the ambient setting is part of what ``jit`` looks programs up by, so that a call
    without it would compile again.
    """
    name = torch.get_float32_matmul_precision()

    def traced(*args: Any) -> Any:
        with matmul_precision(name):
            return function(*args)

    return traced


def _evaluation_program(step: CapturedStep, batch: PlacedBatch) -> Callable[..., Any]:
    """``(params, buffers, raw key, draws, batch, scalars) -> (changed buffers, outputs)``, jitted."""
    forward = _in_matmul_precision(_on_real_rows(step.gradient_function(), batch))

    def evaluate(params: Any, buffers: Any, raw_key: jax.Array, draws: jax.Array, arrays: Any, scalars: Any) -> Any:
        key = jax.random.fold_in(jax.random.wrap_key_data(raw_key), draws)
        found = forward(params, buffers, arrays, key, scalars)
        return found.buffers, found.outputs

    return jax.jit(evaluate)


def _number(leaf: Any) -> Hashable:
    """What a program may have baked in of a leaf that is no tensor: numbers. Strings and ids pass through."""
    if isinstance(leaf, np.ndarray | np.generic):
        return None if leaf.dtype.kind in "OSU" else (leaf.shape, leaf.dtype.str, leaf.tobytes())
    return leaf if isinstance(leaf, bool | int | float) else None


def _host_random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _restore_host_random_state(before: tuple[Any, Any]) -> bool:
    """Put the generators back to where they were, so that whoever repeats the draws gets the same; whether there were any."""
    if repr(_host_random_state()) == repr(before):
        return False
    random.setstate(before[0])
    np.random.set_state(before[1])
    return True


def _difference(before: str, now: str) -> str:
    """The first lines in which two fingerprints differ."""
    old, new = before.splitlines(), now.splitlines()
    for a, b in zip(old, new, strict=False):
        if a != b:
            return f"  at first: {a.strip()[:200]}\n  now:      {b.strip()[:200]}"
    return f"  at first {len(old)} operations, now {len(new)}"
