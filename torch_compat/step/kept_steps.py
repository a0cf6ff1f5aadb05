"""The steps of a module as one run has come to know them, which the next run takes over where nothing else has changed.

A run follows what is assigned while it lasts; nobody follows a module between runs. All that the guards know can be compared, so
that a run which takes steps over compares it once as it begins (:meth:`ProgramCache.begin_run`), and then before each step.
What guards do not see is compared by :class:`~torch_compat.step.circumstances.Circumstances`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_compat.run.report import ExecutorLog
from torch_compat.step.carried import CarriedTensors
from torch_compat.step.effects.recorder import EffectRecorder
from torch_compat.step.materialize import put
from torch_compat.step.model_state import ModelState
from torch_compat.step.outcome import array_of_unread
from torch_compat.step.placed_batch import BatchForms
from torch_compat.step.program_cache import ProgramCache
from torch_compat.step.values.user_objects import containers_around


@dataclass(frozen=True)
class KeptSteps:
    """The steps of a run, with all that it knows of them besides the module's arrays.

    Attributes:
        forms: of batches.
        effects: records what steps change.
        programs: captured and compiled, with their guards.
        carried: tensors that steps carry from batch to batch.
    """

    forms: BatchForms
    effects: EffectRecorder
    programs: ProgramCache
    carried: CarriedTensors

    @classmethod
    def begin(
        cls,
        model: ModelState,
        forms: BatchForms,
        roots: Mapping[str, Any],
        log: ExecutorLog,
        compiling: Callable[[bool], None],
        no_recompilation_after: int | None,
    ) -> KeptSteps:
        """Nothing is known yet; for the arguments see :class:`ProgramCache`."""
        effects = EffectRecorder({**roots, **containers_around(roots.values())})
        programs = ProgramCache(model, roots, effects.roots, log, compiling, no_recompilation_after)
        programs.pad(forms, model.mesh)
        return cls(forms, effects, programs, CarriedTensors(effects.roots, functools.partial(_to_all, model.mesh)))


def _to_all(mesh: Mesh, tensor: torch.Tensor) -> jax.Array:
    """A tensor whole on each device of the mesh; what a program gave, without the host."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    array = array_of_unread(tensor)
    return put(tensor, tensor.dtype, everywhere, broadcast=False) if array is None else jax.device_put(array, everywhere)
