"""The steps of a module as one run has come to know them, which the next run takes over where nothing else has changed.

A run follows what is assigned while it lasts; nobody follows a module between runs. All that the guards know can be compared, so
that a run which takes steps over compares it once as it begins (:meth:`ProgramCache.begin_run`), and then before each step.
What guards do not see is compared by :class:`~torch_compat.step.circumstances.Circumstances`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_compat.step.carried import CarriedTensors
from torch_compat.step.effects.recorder import EffectRecorder
from torch_compat.step.materialize import put
from torch_compat.step.outcome import array_of_unread
from torch_compat.step.placed_batch import BatchForms
from torch_compat.step.program_cache import CacheRun, ProgramCache
from torch_compat.step.values.user_objects import containers_around


@dataclass(frozen=True)
class KeptSteps:
    """The steps of a run, with all that it knows of them besides the module's arrays.

    Attributes:
        forms: of batches.
        effects: records what steps change.
        programs: captured and compiled, with their guards.
        carried: tensors that steps carry from batch to batch.
        plans: the number of each update for which programs were made.
    """

    forms: BatchForms
    effects: EffectRecorder
    programs: ProgramCache
    carried: CarriedTensors
    plans: dict[Hashable, int] = field(default_factory=dict)

    @classmethod
    def begin(cls, run: CacheRun, forms: BatchForms) -> KeptSteps:
        """Nothing is known yet."""
        effects = EffectRecorder({**run.roots, **containers_around(run.roots.values())})
        programs = ProgramCache(run, effects.roots)
        programs.pad(forms, run.model.mesh)
        return cls(forms, effects, programs, CarriedTensors(effects.roots, functools.partial(_to_all, run.model.mesh)))

    def begin_run(self, run: CacheRun) -> None:
        """Go on in another run of the module."""
        changed = self.effects.roots
        now = {**run.roots, **containers_around(run.roots.values())}
        others = {name: value for name, value in changed.items() if name not in now}
        changed.clear()  # steps find what they change in this order
        changed.update({**now, **others})
        self.programs.begin_run(run)

    def end_run(self, leaving: Collection[str]) -> bool:
        """See :meth:`ProgramCache.end_run`."""
        return self.programs.end_run(leaving)


class HoldsSteps(Protocol):
    """The part of a Trainer that holds steps which know it."""

    kept: KeptSteps | None


class ModuleSteps:
    """The steps of one module between its runs, with the circumstances of the last. A copy of the module has none."""

    def __init__(self) -> None:
        self._last: tuple[Any, Callable[[], KeptSteps | None]] | None = None

    def __reduce__(self) -> tuple[type[ModuleSteps], tuple[()]]:
        return ModuleSteps, ()

    def keep(self, circumstances: Any, steps: KeptSteps, run: HoldsSteps) -> None:
        """Keep the steps of a run that has ended: where some know their Trainer, and hold it, as long as ``run`` is there."""
        run.kept = steps if steps.programs.know_trainer else None
        self._last = circumstances, weakref.ref(steps) if run.kept else lambda: steps

    def take(self) -> tuple[Any, KeptSteps] | None:
        """Circumstances and steps of the last run, which nobody else takes; None where there are none."""
        (circumstances, steps), self._last = self._last or (None, lambda: None), None
        return None if (found := steps()) is None else (circumstances, found)


def steps_of(module: torch.nn.Module) -> ModuleSteps:
    """The steps of a module; with its ``__dict__``, so that they are freed with it, whose guards hold it."""
    return module.__dict__.setdefault("_kept_steps", ModuleSteps())


def _to_all(mesh: Mesh, tensor: torch.Tensor) -> jax.Array:
    """A tensor whole on each device of the mesh; what a program gave, without the host."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    array = array_of_unread(tensor)
    return put(tensor, tensor.dtype, everywhere, broadcast=False) if array is None else jax.device_put(array, everywhere)
