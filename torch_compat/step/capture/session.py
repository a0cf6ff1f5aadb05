"""Sessions of captures: runs of a step's Python that leave nothing behind, and comparisons of one run with the next."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from torch_compat.core.toggling import noting_toggled
from torch_compat.step.capture.cached_program import CachedProgram
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.capture.step_capture import CaptureRequest
from torch_compat.step.effects.effects import forgotten, root_name
from torch_compat.step.guards.step_guards import StepGuards
from torch_compat.step.host.assumptions import Assumptions, assuming
from torch_compat.step.metrics.calls import MetricsImportedError
from torch_compat.step.values.generators import same_state
from torch_compat.step.values.user_objects import may_be_followed
from xlatrain.bridge.capture.recorded import op_by_op
from xlatrain.bridge.capture.recorded.tape import NotRecordable
from xlatrain.bridge.errors import BridgeError, CaptureError
from xlatrain.xla.compiler_options import matmul_precision

_T = TypeVar("_T")


class ImpureStepError(CaptureError):
    """The step's Python does something else from one batch to the next, in a way that a compiled step cannot follow."""


@dataclass
class _Attempt:
    """The way in which a capture is tried.

    Attributes:
        op_by_op: as the step runs, not recorded.
        follows_changed: what the attempt before this one changed outside of the followed objects is followed by now.
    """

    op_by_op: bool
    follows_changed: bool = False


class CaptureSession:
    """Captures of one module's steps in one run.

    Args:
        module: whose steps they are.
        guards: follow what a step reads; what it changes outside of the module is taken back.
        changed: name → object whose attributes and contents steps may change; those that a step is seen to change are added.

    Attributes:
        raised: the last exception of the user's own that ended a capture; all that the step had done by then was taken back.
    """

    def __init__(self, module: torch.nn.Module, guards: StepGuards, changed: dict[str, Any]) -> None:
        self._module = module
        self._guards = guards
        self._changed = changed
        self._op_by_op: set[str] = set()  # names of steps that cannot be recorded
        self.raised: Exception | None = None

    def capture(
        self, name: str, request: CaptureRequest[_T], *, again: bool = False, assumptions: Assumptions | None = None
    ) -> _T:
        """Capture a step; where that is in vain, in another way, with all that it did taken back.

        Args:
            name: of the step.
            request: makes the capture.
            again: it was captured before, so that it is known which numbers are inputs and which are constants.
            assumptions: guesses of outcomes; where one leads to an error, another is tried.

        Raises:
            Exception: where all guesses lead to one, the first that tells why there is no capture, else the user's first.
        """
        first: Exception | None = None
        attempt = _Attempt(op_by_op=name in self._op_by_op)
        while True:
            forget_toggled = noting_toggled(self._module)
            try:
                step, changed = contextvars.copy_context().run(self._run, name, request, attempt)  # ContextVars stay as they are
                if not self._retry_following(attempt, changed):
                    self._guards.refuse_changes(name, changed)
                    return step
            except NotRecordable:
                attempt.op_by_op = True
            except MetricsImportedError:
                _retry_with_torchmetrics()
            except Exception as error:
                if first is None or (isinstance(error, BridgeError) and not isinstance(first, BridgeError)):
                    first = error
                if assumptions is None or not assumptions.turn():
                    if again or not self._retry_with_constants(name):
                        self.raised = None if isinstance(first, BridgeError) else first
                        raise first from first.__cause__
                    first = None
                attempt = _Attempt(op_by_op=name in self._op_by_op)
            forget_toggled()

    def _retry_following(self, attempt: _Attempt, changed: Mapping[str, Any]) -> bool:
        """Follow from now on what the step changes outside of the followed objects; False where nothing is new."""
        names = {root_name(self._changed, text, value): value for text, value in changed.items() if may_be_followed(value)}
        new = {name: value for name, value in names.items() if name not in self._changed}
        if attempt.follows_changed or not new:
            return False
        attempt.follows_changed = True
        self._changed.update(new)
        for text, value in new.items():
            self._guards.follow(text, value)
        return True

    def _retry_with_constants(self, name: str) -> bool:
        """Make constants with guards of the changing numbers that were inputs; False where there were none."""
        return self._guards.demote(name)

    def _run(self, name: str, request: CaptureRequest[_T], attempt: _Attempt) -> tuple[_T, dict[str, Any]]:
        """Run the step for a capture, and take back what it did. Gives the capture, and other containers that it changed."""
        before = _host_random_state()
        try:
            with (
                op_by_op() if attempt.op_by_op else contextlib.nullcontext(),
                self._guards.capturing(name) as changed,
                matmul_precision(torch.get_float32_matmul_precision()),
            ):
                step = request.capture(request.inputs())
        except Exception as error:
            self.raised = None if isinstance(error, BridgeError) else error
            raise
        finally:
            drawn = _restore_host_random_state(before)
        if drawn:
            raise ImpureStepError(
                f"{name} draws from Python's or numpy's random generator, which a compiled step would do only once. Draw with "
                "torch (torch.rand, …) in the step, or draw in a hook or in the dataset"
            )
        if attempt.op_by_op:  # steps that raise may be recorded another time
            self._op_by_op.add(name)
        return step, changed

    def forget(self, name: str) -> None:
        """Let go of what is known of a step that is no more."""
        self._op_by_op.discard(name)

    def take(self, name: str, request: CaptureRequest[CapturedStep]) -> CapturedStep | None:
        """The step with a graph that an earlier run of the module has made, found without making one; None if there is none."""
        with contextlib.suppress(Exception):  # a capture will tell
            return self.capture(name, request.taking(), again=True)
        return None

    def repeat(self, name: str, variant: CachedProgram, request: CaptureRequest[CapturedStep]) -> bool:
        """Whether another capture, for the same outcomes, gives the same, found without making a graph."""
        outcomes = variant.step.scalars.outcomes
        with contextlib.suppress(Exception), assuming(outcomes):  # a second capture, which needs no fake results, will tell
            if self.capture(name, request.rehearsal(), again=True) == variant.step.digest:
                return True
        with contextlib.suppress(Exception), assuming(outcomes), forgotten(variant.step.effects, self._changed) as any_entry:
            return any_entry and self.capture(name, request.rehearsal(), again=True) == variant.step.digest
        return False

    def again(self, name: str, variant: CachedProgram, request: CaptureRequest[CapturedStep]) -> CapturedStep:
        """The step of a program captured once more, for the same outcomes."""
        with assuming(variant.step.scalars.outcomes):
            return self.capture(name, request, again=True)

    def audit(self, name: str, variant: CachedProgram, request: CaptureRequest[CapturedStep]) -> bool:
        """Run the step's Python once more with today's host values: a pure step gives the same graph, logs and side effects.

        False: its first run made a list or dict that the next ones fill; what it does from now on may be always the same.
        """
        if self.repeat(name, variant, request):
            variant.note_audited()
            return True
        # The same graph can come of other ops, and an error shall say what differs.
        again = self.again(name, variant, request)
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


def _retry_with_torchmetrics() -> None:
    """Import torchmetrics here, where its tensors are no fake ones."""
    importlib.import_module("torchmetrics")


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
    line = re.sub(r"ValueSlot\((values|scalars|results)[^()]*\)", "<tensor>", line)
    line = re.sub(r"ValueSlot\(batch[^()]*\)", "<leaf of the batch>", line)
    return line.strip().replace("torch.ops.aten.", "aten.")[:200] or "nothing"
