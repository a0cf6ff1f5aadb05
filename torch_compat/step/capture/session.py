"""Sessions of captures: runs of a step's Python that leave nothing behind, and comparisons of one run with another."""

from __future__ import annotations

import contextlib
import contextvars
import decimal
import functools
import importlib
import random
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from torch_compat.core.toggling import noting_toggled
from torch_compat.step.capture.cached_program import CachedProgram
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.capture.outside import OutsideFirstError
from torch_compat.step.capture.recorded_outputs import no_hooks_installed
from torch_compat.step.capture.step_capture import StepInputs, StepSpec, Way, run_step
from torch_compat.step.capture.step_run import Difference, StepRun, graph_of
from torch_compat.step.effects.effects import Effects, forgotten, root_name
from torch_compat.step.guards.place_guards import ChangedSurroundingsError
from torch_compat.step.guards.step_guards import StepGuards
from torch_compat.step.host.assumptions import Assumptions
from torch_compat.step.host.changing_numbers import ChangingNumbers
from torch_compat.step.host.draws import UnseenDrawError
from torch_compat.step.host.host_memory import check_after
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.input_functions import input_functions
from torch_compat.step.host.offsets import MovingOffsets
from torch_compat.step.host.scalar_plan import ArrayForm, ArraysWantedError
from torch_compat.step.metrics.calls import MetricsImportedError
from torch_compat.step.values.generators import host_random_state, same_state
from torch_compat.step.values.taken_values import TAKEN
from torch_compat.step.values.user_objects import may_be_followed
from xlatrain.bridge.capture.autocast import as_on_a_gpu
from xlatrain.bridge.capture.capture import Capture
from xlatrain.bridge.capture.recorded import is_enabled
from xlatrain.bridge.capture.recorded.tape import NotRecordable
from xlatrain.bridge.errors import BridgeError, CaptureError, let_go
from xlatrain.xla.compiler_options import matmul_precision

_T = TypeVar("_T")


class ImpureStepError(CaptureError):
    """The step's Python does something else from one batch to the next, in a way that a compiled step cannot follow."""

    per_batch = True


@dataclass(frozen=True)
class _Attempt:
    """A run of a step, of which a retry makes another.

    Attributes:
        name: of the step.
        host_values: with which it runs.
        way: in which it runs.
        follows_changed: whether what the attempt before it changed outside of the followed objects is followed by now.
        refused: what ended the attempt to record it.
        arrays: the forms of arrays that are its inputs.
        offsets: how it takes places that are known before the step.
        tries: how often these were other ones than it uses.
        functions: that are called before the step.
        watches_draws: whether draws by functions that somebody imported by name are looked for.
        tried_outcomes: whether all outcomes that may help were tried, each recorded.
    """

    name: str
    host_values: HostValues
    way: Way
    follows_changed: bool = False
    refused: Exception | None = None
    arrays: tuple[ArrayForm, ...] = ()
    offsets: MovingOffsets = field(default_factory=MovingOffsets)
    tries: int = 0
    functions: tuple[types.FunctionType, ...] = ()
    watches_draws: bool = False
    tried_outcomes: bool = False


Use = Callable[[StepRun, StepInputs], _T]
"""What is wanted of a run; made while what the run did is not yet taken back, so that it may be let go of first."""


class CaptureSession:
    """Runs of one module's steps for their captures in one run of the module.

    Args:
        module: whose steps they are.
        guards: follow what a step reads; what it changes outside of the module is taken back.
        changed: name → object whose attributes and contents steps may change; those that a step is seen to change are added.
        on_a_gpu: the steps will run on one, whose op lists of autocast differ.
    """

    def __init__(self, module: torch.nn.Module, guards: StepGuards, changed: dict[str, Any], *, on_a_gpu: bool = False) -> None:
        self._lists = as_on_a_gpu if on_a_gpu else contextlib.nullcontext
        self._module = module
        self._guards = guards
        self._changed = changed
        self._op_by_op: set[str] = set()  # names of steps that cannot be recorded
        self._arrays: dict[str, tuple[ArrayForm, ...]] = {}  # by name of the step, those that it used last
        self._exact_offsets: set[str] = set()  # names of steps that want places as constants
        self._functions: dict[str, tuple[types.FunctionType, ...]] = {}  # by name of the step, those that are called before it
        self._watched: set[str] = set()  # names of steps in which draws are looked for
        self._attended: dict[str, ChangingNumbers] = {}
        self._redo: tuple[Callable[[], None], ...] = ()  # of the last run

    def capture(self, name: str, spec: StepSpec, host_values: HostValues, *, take: bool = True) -> CapturedStep:
        """Capture a step.

        Args:
            name: of the step.
            spec: the step.
            host_values: with which it runs.
            take: whether a graph of an earlier run of the module may be taken.

        Raises:
            Exception: see :meth:`_run`.
        """
        attended = name in self._attended
        use = functools.partial(CapturedStep.of, take=take, attended=attended)
        needs_graph = attended or not take
        step = self._run(name, spec, host_values, use, _RETRIES, lambda inputs: needs_graph or not inputs.may_be_kept)
        return replace(step, redo=self._redo) if attended else step

    def attend(self, name: str) -> None:
        """Run the Python of a step before each of its programs from now on: what it does on the host is left there."""
        self._attended.setdefault(name, ChangingNumbers())

    def attends(self, name: str) -> bool:
        """Whether the Python of a step runs before each of its programs."""
        return name in self._attended

    def stop_attending(self, name: str) -> None:
        """A run of a step's Python stands for more than one step again."""
        self._attended.pop(name, None)

    def graph(self, name: str, spec: StepSpec, host_values: HostValues) -> Capture:
        """The graph of a run, of which nothing else is wanted.

        Raises:
            Exception: see :meth:`_run`.
        """
        return self._run(name, spec, host_values, lambda run, inputs: graph_of(run), _MENDING, lambda inputs: True)

    def difference(self, name: str, variant: CachedProgram, spec: StepSpec, host_values: HostValues) -> Difference | None:
        """The difference of another run, for the same outcomes, from the one that a program was made of; None for none.

        Raises:
            Exception: see :meth:`_run`.
        """
        step = variant.step
        if host_values.assumptions is not None:
            host_values = replace(host_values, assumptions=Assumptions(forced=step.scalars.outcomes))

        def use(run: StepRun, inputs: StepInputs) -> Difference | None:
            if run.ops != step.ops:  # its graph is kept: where it is another, a program is made of it
                run = CapturedStep.of(run, inputs, take=True)
            return run.same_as(step)

        found: Difference | Exception | None
        exact = step.scalars.offsets_exact
        try:
            found = self._run(name, spec, host_values, use, _MENDING, exact_offsets=exact)
        except Exception as error:
            found = error
        if found is not None:
            with contextlib.suppress(Exception), forgotten(step.effects, self._changed) as any_entry:
                if any_entry and self._run(name, spec, host_values, use, _MENDING, exact_offsets=exact) is None:
                    return None
        if isinstance(found, Exception):
            raise found
        return found

    def does_the_same(self, name: str, variant: CachedProgram, spec: StepSpec, host_values: HostValues) -> bool:
        """Whether another run, for the same outcomes, does what the one did that a program was made of."""
        with contextlib.suppress(Exception):  # a capture will tell
            return self.difference(name, variant, spec, host_values) is None
        return False

    def audit(self, name: str, variant: CachedProgram, spec: StepSpec, host_values: HostValues) -> bool:
        """Run the step's Python once more with today's host values: a pure step gives the same graph, logs and side effects.

        False: its first run made a list or dict that the next ones fill; what it does from now on may be always the same.

        Raises:
            ImpureStepError: it does something else.
        """
        found = self.difference(name, variant, spec, host_values)
        if found is None:
            variant.note_audited()
            return True
        if not found.in_graph and variant.step.effects.make_containers and variant.runs == 1 and not variant.second:
            return False
        error = ImpureStepError(
            f"{name} does not do the same for every batch, so it cannot be compiled: at first `{found.before}`, now "
            f"`{found.now}`\nA compiled step runs its Python once per variant. Look for host values that change from step to "
            "step (counters, time, random numbers from random or numpy, batch_idx or global_step in arithmetic); keep them in "
            "tensors (register_buffer), or move that part to a hook such as on_train_batch_end; or run eagerly "
            "(XLATRAIN_EXECUTOR=eager)."
        )
        error.recoverable = variant.runs == 1  # the one step that ran did so with its own host values
        error.per_batch = not found.in_graph  # which would be another program for each batch
        raise error

    def forget(self, name: str) -> None:
        """Let go of what is known of a step that is no more."""
        self._op_by_op.discard(name)
        self._attended.pop(name, None)
        self._arrays.pop(name, None)
        self._functions.pop(name, None)
        self._watched.discard(name)
        self._exact_offsets.discard(name)

    def _run(
        self,
        name: str,
        spec: StepSpec,
        host_values: HostValues,
        use: Use[_T],
        retries: Sequence[_Retry],
        needs_graph: Callable[[StepInputs], bool] = lambda inputs: False,
        *,
        exact_offsets: bool | None = None,
    ) -> _T:
        """Run a step for ``use``; where that is in vain, once more in another way, with all that it did taken back.

        Args:
            retries: the other runs, in the order in which they are tried.
            needs_graph: whether ``use`` needs the graph, so that what cannot be recorded is traced at once.
            exact_offsets: whether places that are known before the step are constants; None: as the step wants them.

        Raises:
            Exception: where all runs lead to one, the first that tells why there is no capture, else the user's first.
        """
        first: Exception | None = None
        kept = self._guards.kept_changes(name)
        attempt = self._fresh(name, host_values)
        if exact_offsets is not None:
            attempt = replace(attempt, offsets=MovingOffsets(exact_offsets))
        decimal.getcontext()  # made where it is asked for first, which must not be the copy
        while True:
            forget_toggled = noting_toggled(self._module)
            try:  # ContextVars stay as they are
                return contextvars.copy_context().run(self._run_once, attempt, spec, use, needs_graph)
            except (Exception, MetricsImportedError, OutsideFirstError, ArraysWantedError) as caught:
                error = caught
            again, retry = next(((one, retry) for retry in retries if (one := retry.make(self, attempt, error))), (None, None))
            if retry is None or not retry.mends:
                if isinstance(error, ArraysWantedError):
                    error = CaptureError(f"{name} uses other arrays, or more than {_MOST_ARRAYS}, each time: draw with torch")
                assert isinstance(error, Exception)
                if not getattr(error, "written", ()) and attempt.refused is not None:
                    let_go(error)
                    error = attempt.refused  # as it runs nobody answers: what fails then is no reason
                if first is None or (isinstance(error, BridgeError) and not isinstance(first, BridgeError)):
                    first = error
            if again is None:
                self._guards.take_back_kept(name, kept)
                assert first is not None
                raise first from first.__cause__
            attempt = again
            if error is not first or isinstance(error, BridgeError):
                let_go(error)
            del error
            forget_toggled()

    def _fresh(self, name: str, host_values: HostValues) -> _Attempt:
        way = Way.OP_BY_OP if name in self._op_by_op or not is_enabled() else Way.RECORDED
        offsets = MovingOffsets(name in self._exact_offsets)
        arrays, functions, watches = self._arrays.get(name, ()), self._functions.get(name, ()), name in self._watched
        return _Attempt(name, host_values, way, arrays=arrays, offsets=offsets, functions=functions, watches_draws=watches)

    def _run_once(self, attempt: _Attempt, spec: StepSpec, use: Use[_T], needs_graph: Callable[[StepInputs], bool]) -> _T:
        """Run a step once for ``use``, and take back what it did."""
        name, way, before = attempt.name, attempt.way, host_random_state()
        attended, effects = name in self._attended, Effects()
        try:
            precision = matmul_precision(torch.get_float32_matmul_precision())
            with self._guards.capturing(name, attended=attended) as changed, precision, self._lists(), no_hooks_installed():
                inputs = spec.inputs(attempt.host_values)
                inputs = replace(
                    inputs,
                    arrays=attempt.arrays,
                    numbers=self._attended.get(name),
                    offsets=attempt.offsets,
                    functions=attempt.functions,
                    watches_draws=attempt.watches_draws,
                )
                if way is Way.OP_BY_OP and needs_graph(inputs):
                    way = Way.TRACED
                run = run_step(spec, inputs, way)
                effects = run.effects
                found = use(run, inputs)
        finally:
            after = host_random_state()
            drawn = _restore_host_random_state(before)
        check_after(run.refusals, run.seen)
        if effects.refusal and (effects.only_once or not attended):
            raise ImpureStepError(effects.refusal)
        if attended:
            self._op_by_op.update([name] if way is not Way.RECORDED else [])
            redone = (one.redo for one in changed if one.redo is not None)
            self._redo = (
                TAKEN.settle,
                *redone,
                *effects.redo,
                *([functools.partial(_set_host_random_state, after)] if drawn else []),
            )
            return found
        if drawn:
            raise ImpureStepError(
                f"{name} draws from Python's or numpy's random generator, which a compiled step would do only once. Draw with "
                "torch (torch.rand, …) in the step, or draw in a hook or in the dataset"
            )
        if way is not Way.RECORDED:  # steps that raise may be recorded another time
            self._op_by_op.add(name)
        self._guards.refuse_changes(name, changed)
        return found

    # -- other runs ------------------------------------------------------------------------------------------------

    def _as_it_runs(self, attempt: _Attempt, error: BaseException) -> _Attempt | None:
        if not isinstance(error, NotRecordable) or attempt.way is Way.TRACED:
            return None
        way, cause = Way.OP_BY_OP if attempt.way is Way.RECORDED else Way.TRACED, error.__cause__
        assumptions = attempt.host_values.assumptions
        guessed = assumptions is not None and assumptions.asked
        if isinstance(cause, BridgeError) or (isinstance(cause, Exception) and not guessed):
            return replace(attempt, way=way, refused=attempt.refused or cause)
        if guessed and isinstance(cause, Exception) and attempt.way is Way.RECORDED:  # the user's, which may come of a guess
            if again := self._with_other_outcomes(attempt, error):
                return again
            return replace(attempt, way=way, tried_outcomes=True)
        return replace(attempt, way=way)

    def _with_functions_called_before(self, attempt: _Attempt, error: BaseException) -> _Attempt | None:
        cause = error.__cause__ if isinstance(error, NotRecordable) else error
        if attempt.way is not Way.RECORDED or not isinstance(cause, CaptureError):
            return None
        new = tuple(one for one in input_functions(cause) if one not in attempt.functions)
        if not new:
            return None
        self._functions[attempt.name] = (*attempt.functions, *new)
        return replace(attempt, functions=self._functions[attempt.name])

    def _with_draws_watched(self, attempt: _Attempt, error: BaseException) -> _Attempt | None:
        cause = error.__cause__ if isinstance(error, NotRecordable) else error
        if attempt.watches_draws or not isinstance(cause, UnseenDrawError):
            return None
        self._watched.add(attempt.name)
        return replace(attempt, watches_draws=True)

    def _with_torchmetrics(self, attempt: _Attempt, error: BaseException) -> _Attempt | None:
        if not isinstance(error, MetricsImportedError):
            return None
        importlib.import_module("torchmetrics")  # here, where its tensors are no fake ones
        return attempt

    def _with_that_done_outside(self, attempt: _Attempt, error: BaseException) -> _Attempt | None:
        if not isinstance(error, OutsideFirstError):
            return None
        error.do()
        return attempt

    def _with_arrays(self, attempt: _Attempt, error: BaseException) -> _Attempt | None:
        if not isinstance(error, ArraysWantedError) or attempt.tries == _MOST_ARRAYS:
            return None
        self._arrays[attempt.name] = error.forms
        return replace(attempt, arrays=error.forms, tries=attempt.tries + 1)

    def _with_changes_followed(self, attempt: _Attempt, error: BaseException) -> _Attempt | None:
        """Follow from now on what the step changes outside of the followed objects."""
        if not isinstance(error, ChangedSurroundingsError) or attempt.follows_changed:
            return None
        names = {root_name(self._changed, text, value): value for text, value in error.changed.items() if may_be_followed(value)}
        new = {name: value for name, value in names.items() if name not in self._changed}
        if not new:
            return None
        self._changed.update(new)
        for text, value in new.items():
            self._guards.follow(text, value)
        return replace(attempt, follows_changed=True)

    def _with_other_outcomes(self, attempt: _Attempt, error: BaseException) -> _Attempt | None:
        assumptions = attempt.host_values.assumptions
        again = assumptions is not None and not attempt.tried_outcomes and assumptions.turn()
        return self._fresh(attempt.name, attempt.host_values) if again else None

    def _with_constants(self, attempt: _Attempt, error: BaseException) -> _Attempt | None:
        """Make constants with guards of the changing numbers that were inputs."""
        return self._fresh(attempt.name, attempt.host_values) if self._guards.demote(attempt.name) else None

    def _with_exact_offsets(self, attempt: _Attempt, error: BaseException) -> _Attempt | None:
        """Take slices as the views that they are in torch, one program for each place."""
        if attempt.offsets.exact or not attempt.offsets.met:
            return None
        self._exact_offsets.add(attempt.name)
        return self._fresh(attempt.name, attempt.host_values)


@dataclass(frozen=True)
class _Retry:
    """Another run, after one that came to nothing.

    Attributes:
        name: what is done otherwise.
        make: ``(session, the last attempt, its error)`` → the next; None where this does not help.
        mends: whether the error, which is of our own making then, is no reason to be told.
    """

    name: str
    make: Callable[[CaptureSession, _Attempt, BaseException], _Attempt | None]
    mends: bool = False


_MENDING = (
    _Retry("with draws by functions that were imported by name", CaptureSession._with_draws_watched, mends=True),
    _Retry("with functions called before it that need values", CaptureSession._with_functions_called_before, mends=True),
    _Retry("as it runs, since its ops cannot be recorded", CaptureSession._as_it_runs, mends=True),
    _Retry("with torchmetrics imported", CaptureSession._with_torchmetrics, mends=True),
    _Retry("with what it needs done outside of captures", CaptureSession._with_that_done_outside, mends=True),
    _Retry("with the arrays that it draws as inputs", CaptureSession._with_arrays, mends=True),
    _Retry("with what it changes outside of the module followed", CaptureSession._with_changes_followed, mends=True),
)
_RETRIES = (
    *_MENDING,
    _Retry("with another outcome of what only the running step knows", CaptureSession._with_other_outcomes),
    _Retry("with constants for the numbers that were inputs", CaptureSession._with_constants),
    _Retry("with constants for the places that were inputs", CaptureSession._with_exact_offsets, mends=True),
)


_MOST_ARRAYS = 16


def _restore_host_random_state(before: tuple[Any, Any]) -> bool:
    """Put the generators back, so that repeated draws are the same; returns whether there were any draws."""
    if same_state(host_random_state(), before):
        return False
    _set_host_random_state(before)
    return True


def _set_host_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
