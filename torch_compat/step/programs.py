"""The XLA programs of captured steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding

from torch_compat.step.capture.captured_step import CapturedStep, UpdateOptimizer
from torch_compat.step.placed_batch import PlacedBatch
from xlatrain.mesh.pipelining import Pipelining
from xlatrain.step.assumed import Guarded
from xlatrain.step.stacking import rows, stacked_shardings
from xlatrain.step.state import TrainState
from xlatrain.step.step import GradientFunction, GradientOutput, StepBuilder, UpdatedOutput
from xlatrain.xla.compiler_options import compiler_options, matmul_precision
from xlatrain.xla.passes.apply import apply_jaxpr_passes


def training_program(
    step: CapturedStep, batch: PlacedBatch, mode: str, builder: StepBuilder, pipelining: Pipelining | None = None
) -> Callable[..., Any]:
    """The program of a training step; ``mode`` is ``"fused"``, ``"accumulate"`` or ``"split"``, see :class:`StepBuilder`."""
    make = {"fused": builder.fused, "accumulate": builder.accumulate, "split": builder.split}[mode]
    gradients = step.gradient_function(rolled=builder.stacking is not None, mesh=builder.mesh, pipelining=pipelining)
    return make(in_matmul_precision(_on_real_rows(gradients, batch)))


def updating_program(step: CapturedStep, batch: PlacedBatch, update: UpdateOptimizer, builder: StepBuilder) -> Callable[..., Any]:
    """The program of a training step that runs its optimizers itself, see :meth:`StepBuilder.updating`."""
    function = step.updating_function(update, mesh=builder.mesh)
    cut = _cutting(batch)

    def on_real_rows(state: TrainState, arrays: Any, key: jax.Array, scalars: Any, hypers: Any) -> UpdatedOutput:
        return function(state, cut(arrays), key, scalars, hypers)

    return builder.updating(in_matmul_precision(on_real_rows))


class UpdatingPrograms:
    """Programs of training steps that run their optimizers themselves, one for all captured steps that come to the same.

    A step that clears its gradients before it uses them is captured twice, without gradients for the first batch and with those
    that it left behind: user code may ask which of the two it is.
    """

    def __init__(self) -> None:
        self._made: list[tuple[CapturedStep, Hashable, Callable[..., Any]]] = []

    def of(self, step: CapturedStep, others: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The program of ``step``, made by ``make()`` if there is none yet; ``others`` is what else decides about it."""
        if step.reads_gradients:
            return make()
        for made, of_others, program in self._made:
            if of_others == others and made.program_text == step.program_text:
                return program
        program = make()
        self._made.append((step, others, program))
        return program


def evaluation_program(
    step: CapturedStep,
    batch: PlacedBatch,
    mesh: Mesh,
    shardings: Mapping[str, NamedSharding],
    *,
    stacked: bool,
    pipelining: Pipelining | None = None,
) -> Callable[..., Any]:
    """``(params, buffers, raw key, draws, batch, scalars) -> ((written params, changed buffers), outputs)``, jitted.

    ``shardings`` are the parameters' by name. If ``stacked``, params are (:mod:`xlatrain.step.stacking`), and repeated layers run
    as a loop.
    """
    gradients = step.gradient_function(rolled=stacked, mesh=mesh, pipelining=pipelining)
    forward = in_matmul_precision(_on_real_rows(gradients, batch))

    def evaluate(params: Any, buffers: Any, raw_key: jax.Array, draws: jax.Array, arrays: Any, scalars: Any) -> Any:
        key = jax.random.fold_in(jax.random.wrap_key_data(raw_key), draws)
        found = forward(rows(params) if stacked else params, buffers, arrays, key, scalars)
        outputs = found.outputs if found.outcomes is None else Guarded(found.outputs, found.outcomes.found, {})
        return (dict(found.params), found.buffers), outputs

    program = apply_jaxpr_passes(evaluate, lambda params: stacked_shardings(params, shardings))
    return jax.jit(program, compiler_options=compiler_options(mesh))


def _on_real_rows(gradients: GradientFunction, batch: PlacedBatch) -> GradientFunction:
    """``gradients`` of a padded batch: the padding is cut off first."""
    cut = _cutting(batch)

    def on_real_rows(params: Any, buffers: Any, arrays: Any, key: jax.Array, scalars: Any) -> GradientOutput:
        return gradients(params, buffers, cut(arrays), key, scalars)

    return on_real_rows


def _cutting(batch: PlacedBatch) -> Callable[[Any], Any]:
    """Cuts the padding off the arrays of a batch; where it has none they may be more, those of a bucket of sizes."""
    rows, split = batch.form.rows, batch.form.split
    if not rows.is_padded:
        return lambda arrays: arrays
    return lambda arrays: [rows.cut(one) if is_split else one for one, is_split in zip(arrays, split, strict=True)]


def in_matmul_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` traced under torch's precision of float32 matmuls.

    Inside the program, not around its calls: the ambient setting is part of what ``jit`` looks programs up by, so that a call
    without it would compile again.
    """
    name = torch.get_float32_matmul_precision()

    def in_precision(*args: Any) -> Any:
        with matmul_precision(name):
            return function(*args)

    return in_precision
