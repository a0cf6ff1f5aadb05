"""The runner of compiled steps without runs: a step's program is found, and not called."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jax.sharding import Mesh, NamedSharding

from torch_compat.preflight.abstract_state import AbstractModelState, abstract
from torch_compat.preflight.errors import PreflightError
from torch_compat.run.batches import LoggedSize, first_batch_size, flatten_batch
from torch_compat.step.capture.cached_program import CachedProgram
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.dispatcher import StepDispatcher
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.outcome import StepOutcome
from torch_compat.step.placed_batch import BatchForm, PlacedBatch, global_strides
from torch_compat.step.program_cache import CacheRun, ProgramCache
from xlatrain.bridge.errors import BridgeError
from xlatrain.bridge.lower.work import kernel_flops, model_flops
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.mesh.batch_layout import BatchLayout, BatchPadding
from xlatrain.mesh.mesh import data_parallel_size
from xlatrain.mesh.placement import batch_spec, sequence_length
from xlatrain.mesh.sharding import replicated
from xlatrain.preflight import Work


class ProgramFound(BaseException):  # through the user's hooks around the step (optimizer_step), which may handle Exception
    """The loop would call a program now, and is left.

    Attributes:
        program: the jitted function.
        args: what it would be called with.
        step: what was captured for it.
    """

    def __init__(self, program: Any, args: tuple[Any, ...], step: CapturedStep) -> None:
        super().__init__("preflight ends here")
        self.program = program
        self.args = args
        self.step = step

    def work(self, mesh: Mesh) -> Work:
        """The arithmetic of what was captured, on a mesh."""
        graph = self.step.capture.graph.graph
        return Work(model_flops(graph), kernel_flops(graph, mesh))


class FindingVariants(ProgramCache):
    """A program cache whose programs are captured, and not run."""

    def run(self, variant: CachedProgram, *args: Any) -> Any:
        raise ProgramFound(variant.program, args, variant.step)


class _Layout(NamedTuple):
    """The layout alone, in place of the batch forms of a run that puts no batch together."""

    layout: BatchLayout


class AbstractSteps(MeshStepRunner):
    """Compiled steps over devices that are not here.

    Attributes:
        rows_factor: how many of the batches that it is given make a global batch.
        rows_divisor: into how many smaller ones that is cut.
    """

    rows_factor = 1
    rows_divisor = 1

    def __init__(self, model: AbstractModelState, mesh: Any, services: Any) -> None:
        super().__init__(model, mesh, services)
        self.planned = None
        self._variants = FindingVariants(CacheRun(model, services.roots, self.log, services.compiling), self._effects.roots)

    def _batch_forms(self) -> Any:
        return _Layout(BatchLayout.from_mesh(self.mesh))

    def place(self, batch: Any) -> PlacedBatch:
        """A batch as :attr:`rows_factor` times its rows would lie on the mesh."""
        leaves, spec = flatten_batch(batch)
        size = first_batch_size(leaves)
        rows = None if size is None else max(size * self.rows_factor // self.rows_divisor, 1)
        shards = data_parallel_size(self.mesh)
        padded = 1 if rows is None else -(-rows // shards) * shards
        split = tuple(leaf.ndim > 0 and leaf.shape[0] == size for leaf in leaves)
        placed_rows = BatchPadding.full(1) if rows is None else BatchPadding(rows, padded, ((0, rows),))
        shapes = tuple(
            (((rows, *leaf.shape[1:]) if cut else tuple(leaf.shape)), leaf.dtype) for leaf, cut in zip(leaves, split, strict=True)
        )
        length = sequence_length([tuple(leaf.shape) for leaf, cut in zip(leaves, split, strict=True) if cut], self.mesh)
        arrays = [self._array(leaf, padded if cut else None, length) for leaf, cut in zip(leaves, split, strict=True)]
        logged = LoggedSize.of([shape for shape, _ in shapes], spec)  # pyright: ignore[reportArgumentType]
        form = BatchForm(spec.key, placed_rows, split, shapes, logged, global_strides(leaves, shapes))  # pyright: ignore[reportArgumentType]
        return PlacedBatch(arrays, spec, form)

    def _array(self, leaf: torch.Tensor, rows: int | None, length: int | None) -> Any:
        alone = self.mesh.devices.size == 1 and self.model._unsharded
        if rows is None:
            return abstract(leaf.shape, jax_dtype(leaf.dtype), None if alone else replicated(self.mesh))
        shape = (rows, *leaf.shape[1:])
        place = None if alone else NamedSharding(self.mesh, batch_spec(shape, self.mesh, length))
        return abstract(shape, jax_dtype(leaf.dtype), place)


class AbstractExecutor(StepDispatcher):
    """Chooses compiled steps, or says why there are none."""

    model_state = AbstractModelState
    compiled_steps = AbstractSteps  # pyright: ignore[reportAssignmentType]

    def start(self) -> None:
        if os.environ.get("XLATRAIN_EXECUTOR") == "eager":
            raise PreflightError("XLATRAIN_EXECUTOR=eager: steps that run eagerly have no program to compile; unset it")
        super().start()

    def after_failure(self, error: Exception, eagerly: Callable[[], StepOutcome]) -> StepOutcome:
        """Raise: nothing runs here, so the first error is the one to tell."""
        raise error

    def _run_eagerly(self, reason: str) -> None:
        raise PreflightError(f"the steps of this run would not be compiled, so there is nothing to examine: {reason}")

    def fall_back(self, error: BridgeError) -> None:
        raise error

    def release(self, *, failed: bool = False) -> None:
        if self._compiled is not None:
            self._compiled.model.release(to_host=True)
            self._run.strategy.placed = self._compiled = None
