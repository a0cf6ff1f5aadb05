"""Runs of a step's Python for its captures: what one finds, of which nothing else is left, and whether the next does the same."""

from __future__ import annotations

import contextlib
import importlib
import random
import re
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from torch_compat.core.toggling import noting_toggled
from torch_compat.step.cached_program import CachedProgram
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.capture.step_capture import as_it_runs, digest_of
from torch_compat.step.effects.effects import forgotten
from torch_compat.step.guards.attribute_guards import AttributeGuards
from torch_compat.step.guards.generators import same_state
from torch_compat.step.guards.global_guards import GlobalGuards
from torch_compat.step.guards.user_objects import may_be_followed
from torch_compat.step.host.scalar_plan import HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.metrics.calls import MetricsImportedError
from xlatrain.bridge.capture.recorded.tape import NotRecordable
from xlatrain.bridge.errors import CaptureError
from xlatrain.xla.precision import matmul_precision

_T = TypeVar("_T")

UserStep = Callable[[Any, ScalarTracer], Any]
"""Calls the user's method with a batch and the tracer's counters."""


class ImpureStepError(CaptureError):
    """The step's Python does something else from one batch to the next, in a way that a compiled step cannot follow."""


class CaptureSession:
    """Captures of one module's steps in one run.

    Args:
        module: whose steps they are.
        guards: follow what a step reads.
        surroundings: what a step finds outside of the module; what it changes there is taken back.
        changed: name → object whose attributes and contents steps may change; those that a step is seen to change are added.
    """

    def __init__(
        self, module: torch.nn.Module, guards: AttributeGuards, surroundings: GlobalGuards, changed: dict[str, Any]
    ) -> None:
        self._module = module
        self._guards = guards
        self._surroundings = surroundings
        self._changed = changed
        self._as_they_run: set[str] = set()  # names of steps that cannot be recorded

    def traced(self, call: UserStep, host_values: HostValues) -> UserStep:
        """The user's method, called so that its reads and draws are followed."""

        def traced(batch: Any, tracer: ScalarTracer) -> Any:
            with self._guards.reading(tracer, host_values):
                return call(batch, tracer)

        return traced

    def first(self, name: str, recapture: Callable[[], CapturedStep]) -> CapturedStep:
        """Capture with changing numbers as inputs; as constants with guards, where the step cannot take them so."""
        try:
            return self.take(name, recapture)
        except Exception:
            if not self._guards.demote(name):
                raise
        return self.take(name, recapture)

    def take(self, name: str, recapture: Callable[[], _T]) -> _T:
        """Capture; what the step changes outside of the objects whose side effects are followed is followed from then on."""
        forget_toggled = noting_toggled(self._module)
        step, changed = self._run(name, recapture)
        if new := {text: value for text, value in changed.items() if text not in self._changed and may_be_followed(value)}:
            self._changed.update(new)
            for text, value in new.items():
                self._guards.follow(text, value)
            forget_toggled()
            step, changed = self._run(name, recapture)
        self._surroundings.refuse_changes(name, changed)
        return step

    def _run(self, name: str, recapture: Callable[[], _T]) -> tuple[_T, dict[str, Any]]:
        """Run the step for a capture; again where that was in vain, with all that it did taken back."""
        forget_toggled = noting_toggled(self._module)
        recorded = name not in self._as_they_run
        while True:
            try:
                with contextlib.nullcontext() if recorded else as_it_runs():
                    found = self._run_once(name, recapture)
            except NotRecordable:
                recorded = False
            except MetricsImportedError:
                importlib.import_module("torchmetrics")  # here, where its tensors are no fake ones
            else:
                if not recorded:  # steps that raise may be recorded another time
                    self._as_they_run.add(name)
                return found
            forget_toggled()

    def _run_once(self, name: str, recapture: Callable[[], _T]) -> tuple[_T, dict[str, Any]]:
        """Run the step for a capture; what it did is taken back."""
        before = _host_random_state()
        try:
            with (
                self._surroundings.taken_back(name) as changed,
                self._guards.capturing(name),
                matmul_precision(torch.get_float32_matmul_precision()),
            ):
                step = recapture()
        finally:
            drawn = _restore_host_random_state(before)
        if drawn:
            raise ImpureStepError(
                f"{name} draws from Python's or numpy's random generator, which a compiled step would do only once. Draw with "
                "torch (torch.rand, …) in the step, or draw in a hook or in the dataset"
            )
        return step, changed

    def repeat(self, name: str, variant: CachedProgram, recapture: Callable[[], CapturedStep]) -> bool:
        """Whether another capture gives the same, found without making a graph."""
        with contextlib.suppress(Exception):  # a second capture, which needs no fake results, will tell
            if self.take(name, lambda: digest_of(recapture)) == variant.step.digest:
                return True
        with contextlib.suppress(Exception), forgotten(variant.step.effects, self._changed) as any_entry:
            return any_entry and self.take(name, lambda: digest_of(recapture)) == variant.step.digest
        return False

    def audit(self, name: str, variant: CachedProgram, recapture: Callable[[], CapturedStep]) -> bool:
        """Run the step's Python once more with today's host values: a pure step gives the same graph, logs and side effects.

        False: its first run made a list or dict that the next ones fill; what it does from now on may be always the same.
        """
        if self.repeat(name, variant, recapture):
            return True
        again = self.take(name, recapture)  # the same graph can come of other ops, and an error shall say what differs
        if again.fingerprint == variant.step.fingerprint:
            return True
        same_graph = again.capture.graph.code == variant.step.capture.graph.code
        if same_graph and variant.step.effects.make_containers and variant.runs == 1 and not variant.second:
            return False
        error = ImpureStepError(
            f"{name} does not do the same for every batch, so it cannot be compiled as it is: "
            f"{_difference(variant.step.fingerprint, again.fingerprint)}\n"
            "A compiled step runs its Python once per variant. Look for host values that change from step to step (counters, "
            "time, random numbers from random or numpy, batch_idx or global_step in arithmetic); keep them in tensors "
            "(register_buffer), or move that part to a hook such as on_train_batch_end; or run eagerly "
            "(XLATRAIN_EXECUTOR=eager)."
        )
        error.recoverable = variant.runs == 1  # the one step that ran did so with its own host values
        raise error


def _host_random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _restore_host_random_state(before: tuple[Any, Any]) -> bool:
    """Put the generators back, so that repeated draws are the same; returns whether there were any draws."""
    if same_state(_host_random_state(), before):
        return False
    random.setstate(before[0])
    np.random.set_state(before[1])
    return True


def _difference(before: str, now: str) -> str:
    """The first lines in which two fingerprints differ."""
    old, new = before.splitlines(), now.splitlines()
    for a, b in zip(old, new, strict=False):
        if a != b:
            return f"at first `{_readable(a)}`, now `{_readable(b)}`"
    return f"at first {len(old)} operations, now {len(new)}"


def _readable(line: str) -> str:
    """A line of a fingerprint without our names for what differs from step to step."""
    line = re.sub(r"(Value|Scalar|Result)Place\([^()]*\)", "<tensor>", line)
    line = re.sub(r"(BatchPlace\([^()]*\))", "<leaf of the batch>", line)
    return line.strip().replace("torch.ops.aten.", "aten.")[:200] or "nothing"
