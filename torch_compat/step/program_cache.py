"""The captured and compiled forms of a module's steps, and which of them a batch needs.

That depends on the batch's structure and shapes, and on what the host changed since a form was captured: ``training`` flags,
``requires_grad``, attributes that the step read, the optimizer's flags.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jax.sharding import Mesh

from torch_compat.run.report import ExecutorLog
from torch_compat.step.attended import AttendedStep
from torch_compat.step.buckets import Buckets
from torch_compat.step.capture.cached_program import Build, CachedProgram, NamedStatic
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.capture.session import CaptureSession, ImpureStepError
from torch_compat.step.capture.step_capture import StepSpec
from torch_compat.step.carried import CarriedPlace, places_of, tensor_places, unread_places
from torch_compat.step.effects.effects import Record, outline
from torch_compat.step.effects.recorder import followed
from torch_compat.step.guards.step_guards import StepGuards
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.model_state import ModelState
from torch_compat.step.placed_batch import BatchForms, PlacedBatch
from torch_compat.step.recompilation import Recompilations
from torch_compat.step.step_programs import Doubt, Key, StepPrograms, Surroundings
from xlatrain.bridge.errors import BridgeError, CaptureError
from xlatrain.bridge.tensors.constants import BakedTensor
from xlatrain.host.garbage import uncollected
from xlatrain.mesh.mesh import platform
from xlatrain.xla.compilation_cache import block_of, check, first_run

_OUTLINES = 16
_OTHERS = 3  # programs of a step that looks into what it fills, if none of them comes again
_MAX_SHAPES = 8  # of all buffers together
_MOST_KEPT = 16  # programs of a step, which the next run takes over: a run may have 64


class Wanted(NamedTuple):
    """A step of a batch for which a program is wanted.

    Attributes:
        name: of the user's method.
        static: what else decides about the program (its mode, optimizer flags, the index of the dataloader).
        batch: on the mesh.
        host_values: the loop's counters.
        spec: the step.
        build: makes the program of a captured step, or gives one that an earlier run has compiled.
        may_pad: whether the program may be one for larger batches, which takes its arrays from :meth:`CachedProgram.arrays`.
    """

    name: str
    static: Hashable
    batch: PlacedBatch
    host_values: HostValues
    spec: StepSpec
    build: Build
    may_pad: bool = False


class CacheRun(NamedTuple):
    """A run of a module, as the cache of its programs sees it.

    Attributes:
        model: the module on the mesh.
        roots: name → object whose attributes steps may read (module, callbacks, datamodule).
        log: counts what is compiled.
        compiling: told True while a program is made, False afterwards.
        no_recompilation_after: training batches after which another compilation is an error.
    """

    model: ModelState
    roots: Mapping[str, Any]
    log: ExecutorLog
    compiling: Callable[[bool], None]
    no_recompilation_after: int | None = None


class ProgramCache:
    """The cached programs of one module's steps in one run.

    Args:
        changed: name → object whose attributes and contents steps may change; those that a step is seen to change are added.
    """

    def __init__(self, run: CacheRun, changed: dict[str, Any]) -> None:
        model = run.model
        self._changed = changed
        self._guards = StepGuards(model.module, run.roots, lambda: self._model.find_tensors(), lambda: followed(changed), changed)
        self._captures = CaptureSession(model.module, self._guards, changed, on_a_gpu=platform(model.mesh) == "gpu")
        self._steps: dict[str, StepPrograms] = {}
        self._attended_steps: dict[str, AttendedStep] = {}
        self._flags: tuple[bool, ...] = ()
        self._flags_numbers: dict[tuple[tuple[bool, ...], tuple[tuple[int, ...], ...], Hashable], int] = {}
        self._flags_number = 0
        self._buckets: Buckets | None = None
        self._of_trainer: list[str] = []  # steps of earlier runs that another Trainer may not take over
        self._take(run)

    def _take(self, run: CacheRun) -> None:
        self._model, self._log, self._tell_compiling = run.model, run.log, run.compiling
        self._recompilations = Recompilations(run.log, run.no_recompilation_after)
        self._flags_seen: tuple[int, int] | None = None

    def begin_run(self, run: CacheRun) -> None:
        """Go on in another run of the module, which may have changed since :meth:`end_run`."""
        for told in ("loops", "attention", "losses", "buckets"):  # of the programs that are there
            getattr(run.log, told).extend(getattr(self._log, told))
        self._take(run)
        for one in self._programs():
            one.taken_over = True
        self._guards.begin_run(run.roots)

    def end_run(self, leaving: Collection[str]) -> bool:
        """Let go of what belongs to this run, with the steps that depend on it; whether any step is left.

        Args:
            leaving: names of the roots in whose place another Trainer has others.
        """
        del self._model, self._tell_compiling
        for name, own in list(self._steps.items()):
            if name in self._attended_steps or self._guards.asks_run(name) or sum(1 for _ in own) > _MOST_KEPT:
                self.forget(name)
        changing = [one for one in self._steps.values() if any(program.changes(root) for program in one for root in leaving)]
        self._of_trainer = [name for name, own in self._steps.items() if own in changing or self._guards.meets_run(name, leaving)]
        if not self._of_trainer:
            self._guards.end_run(leaving)
            for name in leaving:
                del self._changed[name]
        return any(map(any, self._steps.values()))

    def forget_trainer(self) -> None:
        """Another Trainer takes the steps over: forget those that know the one before."""
        for name in self._of_trainer:
            self.forget(name)

    @property
    def know_trainer(self) -> bool:
        """Whether some of the steps left by :meth:`end_run` know the Trainer of that run, and hold it."""
        return bool(self._of_trainer)

    def pad(self, forms: BatchForms, mesh: Mesh) -> None:
        """Let one program serve batches of several sizes where that can be."""
        self._buckets = Buckets(self._captures, forms, mesh, lambda line: self._log.buckets.append(line))

    def add_function(self, name: str, function: Callable[..., Any]) -> None:
        """The step ``name`` is a function, no method of the module's."""
        self._guards.add_function(name, function)

    def forget(self, name: str) -> None:
        """Let go of the programs, and of what is guarded for them, of a step that is no more."""
        self._steps.pop(name, None)
        self._attended_steps.pop(name, None)
        self._guards.forget(name)
        self._captures.forget(name)
        if self._buckets is not None:
            self._buckets.forget(name)
        self._recompilations.forget(name)

    def forget_programs(self) -> None:
        """Let go of all programs, since their state has other tensors now, but of nothing else that is known of the steps."""
        self._steps.clear()

    def changes(self, root: str) -> bool:
        """Whether a program is there that changes something below this root."""
        return any(one.changes(root) for one in self._programs())

    def reading(self, tracer: ScalarTracer, host_values: HostValues) -> contextlib.AbstractContextManager[None]:
        """The context of the user's method in a capture: what it reads and draws is followed."""
        return self._guards.reading(tracer, host_values)

    def following(self) -> contextlib.AbstractContextManager[None]:
        """The context of a whole run: what the host assigns to modules is followed."""
        return self._guards.following()

    def rescan(self) -> None:
        """Find what the host changed in ways that are not followed; not for every step."""
        self._guards.rescan()
        for one in self._programs():
            one.rescan()

    def _programs(self) -> Iterator[CachedProgram]:
        for own in self._steps.values():
            yield from own

    def program(self, wanted: Wanted) -> CachedProgram:
        """The program for a step as the host is now, with its random draws made; captured and built if there is none yet.

        Raises:
            CaptureError: the step cannot be captured, or does something else from batch to batch.
        """
        name, host_values = wanted.name, wanted.host_values
        own = self._steps.get(name) or self._steps.setdefault(name, StepPrograms(name))
        fixed = self._look(wanted)
        if self._captures.attends(name):
            program = self._attended(own, fixed, wanted)
        else:
            key = (fixed, self._guards.key(name))
            self._guards.fill(name, host_values.numbers)
            replaced = differs = False
            while isinstance(found := self._find(own, key, host_values), Doubt):
                with self._telling_stored():
                    same = self._settle(own, key, found, wanted)
                replaced = replaced or (found.is_audit and not same)
                differs = differs or (found.is_of_state and not same)
                if found.is_of_state and same and own.answered(key, found.about) == 1:
                    self._guards.count_state(name, same=True)
            if found is None:
                if differs or (own.of(key) and not own.answered(key, self._guards.state(name))):
                    self._guards.count_state(name, same=False)
                with self._compiling(), self._telling_stored():
                    found = self._capture(own, fixed, wanted, second=replaced)
                self._keep(own, found, wanted, fixed, second=replaced)
            elif found.taken_over:
                self._count_taken_over(found)
            program = found
        program.draw(host_values)
        return program

    def _look(self, wanted: Wanted) -> tuple[Any, ...]:
        """Look at the module, the batch and the host as they are; gives what decides about a program besides guards."""
        self._model.push_writes()
        self._guards.refresh(wanted.name)
        self._model.check_tensors()
        batch, host_values = wanted.batch, wanted.host_values
        host_values.others, host_values.batch = batch.spec.others, batch.values
        if batch.values is not None:
            batch.values.state = self._model.value_before_step if batch.values.takes_state else None
        return (wanted.name, wanted.static, self._tensors_number(), batch.key())

    def _find(self, own: StepPrograms, key: Key, host_values: HostValues) -> CachedProgram | Doubt | None:
        """See :meth:`StepPrograms.find`."""
        if not own.of(key):
            return None
        state = self._guards.state(own.name)
        around = Surroundings(
            state, lambda before: self._guards.comparable(own.name, before, state), self._outline(own), self._changed
        )
        return own.find(key, host_values, around)

    def _outline(self, own: StepPrograms) -> tuple[Hashable, ...]:
        return tuple(outline(place, self._changed) for place in own.deciding) if own.deciding else ()

    def _settle(self, own: StepPrograms, key: Key, doubt: Doubt, wanted: Wanted) -> bool:
        """Run the step's Python once more, and note at the program that is in doubt whether it does the same.

        Raises:
            ImpureStepError: it does something else each time, or this would have to be asked all the time.
        """
        program, about = doubt.program, (wanted.name, doubt.program, wanted.spec, wanted.host_values)
        if doubt.answers is None:
            try:
                learned = self._guards.learn_read_entries(own.name, program.step.effects)  # that its first run has made
                same = not learned and self._captures.audit(*about)
            except ImpureStepError:
                same = False
                if not self._guards.learn_entries(own.name, program.step.effects):
                    raise
            if not same:
                own.drop(program)
            return same
        of_outline = not doubt.is_of_state
        seldom = len(program.outlines) > _OUTLINES and len(program.outlines) * 8 > program.runs
        if of_outline and (seldom or (len(own.of(key)) > _OTHERS and all(one.runs == 1 for one in own.of(key)))):
            raise ImpureStepError(
                f"{own.name} fills {next(iter(own.deciding))} and looks at what is in there, or changes an entry of it, while it "
                "is another all the time: look at it in a hook such as on_train_batch_end; or run eagerly "
                "(XLATRAIN_EXECUTOR=eager)"
            )
        with self._compiling():
            same = not (of_outline and program.step.scalars.draws) and self._captures.does_the_same(*about)
            if not same:
                self._guards.learn_entries(own.name, program.step.effects)
        doubt.answers[doubt.about] = same
        return same

    @contextlib.contextmanager
    def _telling_stored(self) -> Iterator[None]:
        """An error of a capture says which places have the values that steps have stored, where it is of one of them."""
        try:
            yield
        except BridgeError as error:
            if error.stored is not None:
                error.carried = self._stored(error.stored, error.storing)
            elif error.written:
                there = [one for written in error.written if (one := written()) is not None]
                error.carried = places_of(there, self._carrying(), self._changed)
            raise

    def _keep(self, own: StepPrograms, program: CachedProgram, wanted: Wanted, fixed: Hashable, *, second: bool) -> None:
        """Keep a program that was captured, and count it."""
        name = own.name
        compiled = not any(one.program is program.program for one in self._programs())
        program.states[self._guards.state(name)] = True
        own.add((fixed, self._guards.key(name)), program)
        self._count(compiled, program.compiled)
        own.check_number(self._log.recompilations)
        if program.padding is not None and not compiled:
            return
        facts = self._facts(name, wanted.static, wanted.batch, program.step)
        facts = {**facts, "what the step does": "as from its second run on"} if second else facts
        self._recompilations.count_capture(name, facts, compiled=compiled and not program.compiled)

    def attend(self, name: str, error: BridgeError) -> bool:
        """Run the Python of a step before each of its programs from now on; False where that is no help against an error."""
        if not (error.per_batch and error.recoverable) or name in self._attended_steps:
            return False
        self._captures.attend(name)
        self._attended_steps[name] = AttendedStep(name, error)
        return True

    def _attended(self, own: StepPrograms, fixed: tuple[Any, ...], wanted: Wanted) -> CachedProgram:
        """The program of a step whose Python runs before each of its programs.

        Raises:
            BridgeError: the reason for which the step is attended, where this does not help.
        """
        name = own.name
        step = self._attended_steps[name]
        try:
            self._guards.key(name)
            with self._telling_stored():
                program = self._capture(own, fixed, wanted._replace(may_pad=False), second=False)
        except BridgeError as error:
            if error.carried or error.written:
                raise
            self._captures.stop_attending(name)
            raise step.reason from step.reason.__cause__
        try:
            if program.step.scalars.assumed:  # where the program finds another outcome, this run has done the wrong thing
                raise step.reason from step.reason.__cause__
            program.runs = step.count(program.program)
        except BridgeError:
            self._captures.stop_attending(name)
            raise
        if program.runs == 0:
            self._count(True, program.compiled)
        return program

    def _capture(self, own: StepPrograms, fixed: tuple[Any, ...], wanted: Wanted, *, second: bool) -> CachedProgram:
        """The form of the step for the host values of this moment."""
        name, batch, host_values, spec, build = own.name, wanted.batch, wanted.host_values, wanted.spec, wanted.build
        self._guards.promote(name)
        self._guards.fill(name, host_values.numbers)
        step = self._captures.capture(name, spec, host_values, take=not second)
        if self._guards.learn_read_entries(name, step.effects):
            self._guards.fill(name, host_values.numbers)
            step = self._captures.capture(name, spec, host_values, take=not second)
        self._log.captures += not step.taken
        padding, buckets = None, self._buckets if wanted.may_pad else None
        if buckets is not None:
            others = (*fixed[1:-1], tuple(map(repr, batch.spec.others)))
            padding = buckets.padding(name, others, step, batch, spec, host_values)
        if padding is None or buckets is None:
            built = build(step, batch)
        else:
            built = buckets.note_built(padding, build(padding.bucket.step, padding.bucket.batch))
            step = padding.bucket.audited(step)
        self._guards.skip_own(name, step.effects, self._changed)
        branches = step.scalars.branch_on_draws(host_values)
        program = CachedProgram(step, second=second, branches_on_draws=branches, padding=padding, **built._asdict())
        program.block = block_of(program.program)
        program.rebound = step.effects.attributes(rebound=True)
        if step.effects.fill_containers:
            own.deciding.update(dict.fromkeys(self._guards.deciding(name, step.effects)))
        program.outlines[self._outline(own)] = True
        self._check_carried(own, fixed, step)
        outside = {id(one): one for one in (*step.capture.constants.values(), *step.scalars.constants)}.values()
        program.constants = [BakedTensor(one, self._guards.name_of(name, one)) for one in outside]
        return program

    def note_held(self, name: str, program: CachedProgram) -> None:
        """Note that the outcomes of a step were those for which this program was made."""
        self._steps[name].note_held(program)

    def note_wrong(self, program: CachedProgram) -> None:
        """Note that a program ran in vain: the outcomes of the step were others."""
        self._log.repeated += 1
        program.runs -= 1

    def note_replayed(self, variant: CachedProgram) -> None:
        """Note that the side effects of a step were replayed: what it assigns anew was assigned."""
        self._guards.note_replayed(variant.rebound)

    def _check_carried(self, own: StepPrograms, fixed: Hashable, step: CapturedStep) -> None:
        """Refuse a step that carries state from one batch to the next in attributes.

        A flag that is set once makes two variants; more show that the value changes all the time.
        """
        name = own.name
        constant, both = self._guards.carried(name, step.effects, list(step.capture.constants.values()), step.caches)
        count = sum(one.step.scalars.outcomes == step.scalars.outcomes for one in own.of_caller(fixed))  # others are other steps
        places = places_of(step.capture.constants.values(), [*self._carrying(), *step.effects.records], self._changed)
        if constant is None and not places and (count < 2 or not both or self._captures.attends(name)):
            return
        found = constant or ", ".join(map(str, places or both))
        error = ImpureStepError(
            f"{name} reads {found} and changes it for the next batch, which is not a part of the compiled step's state. Keep it "
            "in a buffer (self.register_buffer), or change it in a hook such as on_train_batch_end; or run eagerly "
            "(XLATRAIN_EXECUTOR=eager)."
        )
        error.carried = places
        raise error

    def carry(self, name: str, places: Iterable[CarriedPlace]) -> None:
        """Tensors at these places are inputs of the step from now on; as attributes they do not select its program."""
        for place in places:
            if place.attribute is not None:
                self._guards.carry(name, place.attribute)

    def _stored(self, tensor: torch.Tensor, storing: Sequence[Record]) -> tuple[CarriedPlace, ...]:
        """The places of values that steps have stored and nobody has read yet, if one of them is ``tensor``.

        Args:
            storing: the changes of a run that would store it again: where they are tensors are there, too.
        """
        records = [*self._carrying(), *storing]
        found = places_of([tensor], records, self._changed)
        return found and (*found, *tensor_places(storing, self._changed), *unread_places(records, self._changed))

    def _carrying(self) -> list[Record]:
        """The changes by which steps store values: one step may read what another has stored."""
        return [record for one in self._programs() for record in one.step.carrying]

    def _count(self, new: bool, compiled_before: bool) -> None:
        self._log.variants += new
        self._log.taken += new and compiled_before

    def _count_taken_over(self, program: CachedProgram) -> None:
        for one in self._programs():
            one.taken_over = one.taken_over and one.program is not program.program
        self._count(True, True)

    def _facts(self, name: str, static: Hashable, batch: PlacedBatch, step: CapturedStep) -> dict[str, str]:
        """The facts that the program just captured depends on, in the user's words."""
        facts = batch.facts()
        facts.update({f"{one}.requires_grad": str(flag) for one, flag in zip(self._model.params, self._trainable(), strict=True)})
        if self._model.shapes_changed:
            shapes = zip(self._model.buffers, self._model.buffer_shapes(), strict=False)
            facts.update({f"shape of the buffer self.{one}": str(shape) for one, shape in shapes})
        facts.update({f"{one}.stride()": str(strides) for one, strides in self._model.strides.items()})
        facts.update(self._guards.facts(name))
        facts.update({f"`{guard.text.removesuffix(' ==')}`": repr(guard.outcome) for guard in step.scalars.guards})
        facts.update({guard.text: repr(guard.outcome)[:60] for guard in step.scalars.asked})
        facts.update({f"{one.text} ({place})": str(one.outcome) for place, one in enumerate(step.scalars.assumed)})
        parts = static if isinstance(static, tuple) and not isinstance(static, NamedStatic) else (static,)
        trains = name == "training_step" or any(isinstance(part, NamedStatic) for part in parts[-1:])
        names = ("kind of step", "accumulated batches", "optimizer options") if trains else ("dataloader_idx",)
        facts.update(
            {what: str(part)[:100] for what, part in zip(names, parts, strict=False) if not isinstance(part, NamedStatic)}
        )
        for part in (one for one in parts if isinstance(one, NamedStatic)):
            facts.update({what: repr(value)[:100] for what, value in part})
        return facts

    def _trainable(self) -> tuple[bool, ...]:
        """``requires_grad`` of every parameter."""
        self._tensors_number()
        return self._flags

    def _tensors_number(self) -> int:
        """A number for the parameters' ``requires_grad``, the buffers' shapes and the strides of both; read again only after one
        changed.

        Raises:
            CaptureError: buffers change their shapes all the time.
        """
        seen = (self._model.live.forms_changed, self._model.shapes_changed)
        if self._flags_seen != seen:
            self._flags, shapes = self._model.requires_grad(), self._model.buffer_shapes()
            forms = (self._flags, shapes, tuple(self._model.strides.items()))
            self._flags_number = self._flags_numbers.setdefault(forms, len(self._flags_numbers))
            known = dict.fromkeys(shapes for _, shapes, _ in self._flags_numbers)
            if len(known) > _MAX_SHAPES:
                last = zip(self._model.buffers, *list(known)[-2:], strict=False)
                name, before, now = next(one for one in last if one[1] != one[2])
                raise CaptureError(
                    f"the buffer self.{name} changes its shape all the time, lately from {before} to {now}, and each shape needs "
                    "another program. Make the buffer as large as it may become, and keep the number of its rows in use in "
                    "another one"
                )
            self._flags_seen = seen
        return self._flags_number

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        start = time.perf_counter()
        self._tell_compiling(True)
        try:
            yield
        finally:
            self._tell_compiling(False)
            self._log.seconds += time.perf_counter() - start

    def check(self, variant: CachedProgram, *args: Any) -> None:
        """Raise now what lowering its program raises, where that would be at a moment too late to run something else."""
        if not (variant.runs or variant.compiled or variant.is_checked):
            variant.is_checked = True
            with self._compiling():
                check(variant.program, *args)

    def run(self, variant: CachedProgram, *args: Any) -> Any:
        """Run its program, which compiles it the first time."""
        variant.runs += 1
        if variant.runs > 1 or variant.compiled:
            result = variant.program(*args)
            if variant.block is not None:
                variant.block.settle()
            return result
        with self._compiling(), uncollected(), warnings.catch_warnings():
            # The gradients of an accumulation window are donated with the state, though nothing takes their place.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            result = first_run(variant.program, *args)
        variant.block = block_of(variant.program)
        return result
