"""The captured and compiled forms of a module's steps, and which of them a batch needs.

That depends on the batch's structure and shapes, and on what the host changed since a form was captured: ``training`` flags,
``requires_grad``, attributes that the step read, the optimizer's flags.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from jax.sharding import Mesh

from torch_compat.run.report import ExecutorLog
from torch_compat.step.attended import AttendedStep
from torch_compat.step.buckets import Buckets
from torch_compat.step.capture.cached_program import Build, CachedProgram, NamedStatic
from torch_compat.step.capture.captured_step import CapturedStep
from torch_compat.step.capture.session import CaptureSession, ImpureStepError
from torch_compat.step.capture.step_capture import StepSpec
from torch_compat.step.carried import CarriedPlace, places_of, unread_places
from torch_compat.step.effects.effects import ObjectPath, outline
from torch_compat.step.effects.recorder import followed
from torch_compat.step.guards.step_guards import StepGuards
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.model_state import ModelState
from torch_compat.step.placed_batch import BatchForms, PlacedBatch
from torch_compat.step.recompilation import Recompilations
from xlatrain.bridge.errors import BridgeError
from xlatrain.bridge.tensors.constants import BakedTensor
from xlatrain.xla.compilation_cache import block_of, first_run

_MAX_VARIANTS = 64
_MAX_ASKED = 16  # variants of a step for values for which its Python asks, if few of them come again
_MAX_PADDED = 256  # sizes whose captures are kept, of those that share a program
_OUTLINES = 16
_FORGETS = 0.8  # what followed the same outcomes before counts for less each time: outcomes change in the course of a training


class ProgramCache:
    """The cached programs of one module's steps in one run.

    Args:
        model: the module on the mesh.
        roots: name → object whose attributes steps may read (module, callbacks, datamodule).
        changed: name → object whose attributes and contents steps may change; those that a step is seen to change are added.
        log: counts what is compiled.
        compiling: told True while a program is made, False afterwards.
        no_recompilation_after: training batches after which another compilation is an error.
    """

    def __init__(
        self,
        model: ModelState,
        roots: Mapping[str, Any],
        changed: dict[str, Any],
        log: ExecutorLog,
        compiling: Callable[[bool], None],
        no_recompilation_after: int | None = None,
    ) -> None:
        self._model = model
        self._changed = changed
        self._guards = StepGuards(model.module, roots, lambda: self._model.find_tensors(), lambda: followed(changed))
        self._captures = CaptureSession(model.module, self._guards, changed)
        self._log = log
        self._tell_compiling = compiling
        self._variants: dict[Any, dict[int, list[CachedProgram]]] = {}  # by :meth:`StepGuards.state`
        self._deciding: dict[str, dict[ObjectPath, None]] = {}  # containers on whose contents a step's effects may depend
        self._flags_seen = -1
        self._flags: tuple[bool, ...] = ()
        self._flags_numbers: dict[tuple[bool, ...], int] = {}
        self._flags_number = 0
        self._recompilations = Recompilations(log, no_recompilation_after)
        self._held: dict[str, CachedProgram] = {}  # by step, whose outcomes were those of the last batch
        self._holds = 0
        self._buckets: Buckets | None = None
        self._padded: deque[tuple[list[CachedProgram], CachedProgram]] = deque()
        self._attended_steps: dict[str, AttendedStep] = {}
        self._taken_over: set[Callable[..., Any]] = set()  # programs of earlier runs that this one has not used yet

    def begin_run(
        self, model: ModelState, log: ExecutorLog, compiling: Callable[[bool], None], no_recompilation_after: int | None
    ) -> None:
        """Go on in another run of the module, which may have changed since :meth:`end_run`; arguments as for the cache."""
        for told in ("loops", "attention", "losses", "buckets"):  # of the programs that are there
            getattr(log, told).extend(getattr(self._log, told))
        self._model, self._log, self._tell_compiling = model, log, compiling
        self._recompilations = Recompilations(log, no_recompilation_after)
        self._flags_seen = -1
        self._taken_over = {one.program for one in self._all(lambda key: True)}
        self._guards.begin_run()

    def end_run(self) -> bool:
        """Let go of what belongs to this run; False where steps depend on it, so that no other run may take them over."""
        del self._model, self._tell_compiling
        self._captures.raised = None
        asks_run = any(self._guards.asks_run(name) for name in {key[0][0] for key in self._variants})
        return not asks_run and not self._attended_steps

    def pad(self, forms: BatchForms, mesh: Mesh) -> None:
        """Let one program serve batches of several sizes where that can be."""
        self._buckets = Buckets(self._captures, forms, mesh, lambda line: self._log.buckets.append(line))

    def add_function(self, name: str, function: Callable[..., Any]) -> None:
        """The step ``name`` is a function, no method of the module's."""
        self._guards.add_function(name, function)

    def forget(self, name: str) -> None:
        """Let go of the programs, and of what is guarded for them, of a step that is no more."""
        for key in [key for key in self._variants if key[0][0] == name]:
            del self._variants[key]
        self._deciding.pop(name, None)
        self._held.pop(name, None)
        self._attended_steps.pop(name, None)
        self._guards.forget(name)
        self._captures.forget(name)
        if self._buckets is not None:
            self._buckets.forget(name)
        self._recompilations.forget(name)

    def changes(self, root: str) -> bool:
        """Whether a program is there that changes something below this root."""
        found = self._all(lambda key: True)
        return any(record.place.root == root for variant in found for record in variant.step.effects.records)

    def reading(self, tracer: ScalarTracer, host_values: HostValues) -> contextlib.AbstractContextManager[None]:
        """The context of the user's method in a capture: what it reads and draws is followed."""
        return self._guards.reading(tracer, host_values.numbers)

    def raised(self, error: Exception) -> bool:
        """Whether it is the user's own, raised by a step while it was captured; what that had done was taken back."""
        return self._captures.raised is error

    def following(self) -> contextlib.AbstractContextManager[None]:
        """The context of a whole run: what the host assigns to modules is followed."""
        return self._guards.following()

    def rescan(self) -> None:
        """Find what the host changed in ways that are not followed; not for every step."""
        self._guards.rescan()
        for variant in self._all(lambda key: True):
            variant.rescan()

    def lookup_or_capture(
        self,
        name: str,
        static: Hashable,
        batch: PlacedBatch,
        host_values: HostValues,
        spec: StepSpec,
        build: Build,
        *,
        may_pad: bool = False,
    ) -> CachedProgram:
        """The variant for this batch and these host values; captured and built if there is none yet.

        Args:
            name: of the user's method.
            static: what else decides about the program (its mode, optimizer flags, the index of the dataloader).
            batch: on the mesh.
            host_values: the loop's counters.
            spec: the step.
            build: makes the program of a captured step, or gives one that an earlier run has compiled.
            may_pad: whether the program may be one for larger batches, which takes its arrays from :meth:`CachedProgram.arrays`.

        Raises:
            CaptureError: the step cannot be captured, or does something else from batch to batch.
        """
        self._model.push_writes()
        self._guards.refresh(name)
        self._model.check_tensors()
        fixed = (name, static, self._trainable_number(), batch.key())
        self._tell_batch(batch, host_values)
        if self._captures.attends(name):
            return self._attended(name, fixed, batch, host_values, spec, build)
        key = self._guards.key(name)
        self._guards.fill(name, host_values.numbers)
        replaced = False
        family = self._variants.get((fixed, key))
        variants = self._in_state(name, family, spec, host_values) if family else []
        deciding = self._deciding.get(name)
        assumptions = host_values.assumptions
        for variant in self._likeliest_first(name, variants):
            if assumptions is not None and not assumptions.agree(variant.step.scalars.outcomes):
                continue
            if not variant.branches_on_draws and not variant.fits(host_values, self._changed):
                continue
            if deciding and not self._decides_so(deciding, name, variant, spec, host_values):
                continue
            take_back = variant.draw(host_values)
            if assumptions is not None:
                assumptions.take_back = take_back
            if not variant.branches_on_draws or variant.fits(host_values, self._changed):
                if not variant.is_due or self._audit_before_draws(name, variant, spec, host_values, take_back):
                    self._count_taken_over(variant)
                    return variant
                variants.remove(variant)
                replaced = True
                break
            if take_back is not None:
                take_back()
        with self._compiling():
            try:
                variant = self._capture_program(name, fixed, batch, host_values, spec, build, second=replaced, may_pad=may_pad)
            except BridgeError as error:
                if error.stored is not None:
                    error.carried = self._stored(name, error.stored)
                raise
        variant.take_back = None
        compiled = not any(one.program is variant.program for one in self._all(lambda key: True))
        state = self._guards.state(name)
        variants = self._variants.setdefault((fixed, self._guards.key(name)), {}).setdefault(state, [])
        variants.append(variant)
        self._count(name, compiled, variant.compiled)
        if variant.padding is not None:
            self._keep_few(variants, variant)
            if not compiled:
                return variant
        facts = self._facts(name, static, batch, variant.step)
        facts = {**facts, "what the step does": "as from its second run on"} if replaced else facts
        self._recompilations.count_capture(name, facts, compiled=compiled and not variant.compiled)
        return variant

    def _tell_batch(self, batch: PlacedBatch, host_values: HostValues) -> None:
        host_values.others, host_values.batch = batch.spec.others, batch.values
        if batch.values is not None:
            batch.values.state = self._model.value_before_step if batch.values.takes_state else None

    def attend(self, name: str, error: BridgeError) -> bool:
        """Run the Python of a step before each of its programs from now on; False where that is no help against an error."""
        if not (error.per_batch and error.recoverable) or name in self._attended_steps:
            return False
        self._captures.attend(name)
        self._attended_steps[name] = AttendedStep(name, error)
        return True

    def _attended(
        self, name: str, fixed: tuple[Any, ...], batch: PlacedBatch, host_values: HostValues, spec: StepSpec, build: Build
    ) -> CachedProgram:
        """The program of a step whose Python runs before each of its programs.

        Raises:
            BridgeError: the reason for which the step is attended, where this does not help.
        """
        step = self._attended_steps[name]
        try:
            self._guards.key(name)
            variant = self._capture_program(name, fixed, batch, host_values, spec, build, second=False, may_pad=False)
        except BridgeError as error:
            if error.stored is not None:
                error.carried = self._stored(name, error.stored)
            if error.carried:
                raise
            self._captures.stop_attending(name)
            raise step.reason from step.reason.__cause__
        try:
            if variant.step.scalars.assumed:  # where the program finds another outcome, this run has done the wrong thing
                raise step.reason from step.reason.__cause__
            variant.runs = step.count(variant.program)
        except BridgeError:
            if variant.take_back is not None:  # the eager step draws itself
                variant.take_back()
            self._captures.stop_attending(name)
            raise
        variant.take_back = None
        if variant.runs == 0:
            self._count(name, True, variant.compiled)
        return variant

    def _capture_program(
        self,
        name: str,
        fixed: tuple[Any, ...],
        batch: PlacedBatch,
        host_values: HostValues,
        spec: StepSpec,
        build: Build,
        *,
        second: bool,
        may_pad: bool,
    ) -> CachedProgram:
        """The form of the step for the host values of this moment, with its draws made."""
        self._guards.promote(name)
        self._guards.fill(name, host_values.numbers)
        step = self._captures.capture(name, spec, host_values, take=not second)
        self._log.captures += not step.taken
        padding, buckets = None, self._buckets if may_pad else None
        if buckets is not None:
            others = (*fixed[1:-1], tuple(map(repr, batch.spec.others)))
            padding = buckets.padding(name, others, step, batch, spec, host_values)
        if padding is None or buckets is None:
            built = build(step, batch)
        else:
            built = buckets.note_built(padding, build(padding.bucket.step, padding.bucket.batch))
            step = padding.bucket.audited(step)
        self._guards.skip_own(name, step.effects, self._changed)
        take_back = None
        if step.scalars.draws:
            take_back = step.scalars.draws.try_out(host_values.numbers)
            if host_values.assumptions is not None:
                host_values.assumptions.take_back = take_back
        branches = step.scalars.branch_on_draws(host_values)
        variant = CachedProgram(step, second=second, branches_on_draws=branches, padding=padding, **built._asdict())
        variant.block, variant.take_back = block_of(variant.program), take_back
        variant.rebound = step.effects.attributes(rebound=True)
        if step.effects.fill_containers:
            self._deciding.setdefault(name, {}).update(dict.fromkeys(self._guards.deciding(name, step.effects)))
        if deciding := self._deciding.get(name):
            variant.outlines[tuple(outline(place, self._changed) for place in deciding)] = True
        self._check_carried(name, fixed, step)
        outside = {id(one): one for one in (*step.capture.constants.values(), *step.scalars.constants)}.values()
        variant.constants = [BakedTensor(one, self._guards.name_of(name, one)) for one in outside]
        return variant

    def _keep_few(self, variants: list[CachedProgram], variant: CachedProgram) -> None:
        """Let go of what was captured long ago for a size that shares its program; another capture finds it again."""
        self._padded.append((variants, variant))
        if len(self._padded) > _MAX_PADDED:
            others, oldest = self._padded.popleft()
            if oldest in others:
                others.remove(oldest)

    def _likeliest_first(self, name: str, variants: list[CachedProgram]) -> list[CachedProgram]:
        """Programs in the order of trying: of those made for outcomes first what mostly came after the same, then the latest."""
        if len(variants) < 2 or not any(one.step.scalars.assumed for one in variants):
            return variants
        last = self._held.get(name)
        followed = {} if last is None else last.followed
        return sorted(variants, key=lambda one: (followed.get(one, 0.0), one.held_at), reverse=True)

    def note_held(self, name: str, variant: CachedProgram) -> None:
        """Note that the outcomes of a step were those for which this program was made."""
        if (last := self._held.get(name)) is not None:
            last.followed = {one: count * _FORGETS for one, count in last.followed.items()}
            last.followed[variant] = last.followed.get(variant, 0.0) + 1
        self._holds += 1
        variant.held_at, self._held[name] = self._holds, variant

    def note_wrong(self, variant: CachedProgram) -> None:
        """Note that a program ran in vain: the outcomes of the step were others."""
        self._log.repeated += 1
        variant.runs -= 1

    def _in_state(
        self, name: str, family: dict[int, list[CachedProgram]], spec: StepSpec, host_values: HostValues
    ) -> list[CachedProgram]:
        """The programs of a family that were captured in the present state of the globals, or in one that makes no difference."""
        state = self._guards.state(name)
        if state in family or not family:
            return family.setdefault(state, [])
        with self._compiling():
            for before, variants in list(family.items()):
                if self._guards.comparable(name, before, state) and any(
                    self._captures.does_the_same(name, variant, spec, host_values)
                    for variant in variants
                    if self._would_fit(variant, host_values)
                ):
                    self._guards.count_state(name, same=True)
                    family[state] = variants
                    return variants
        self._guards.count_state(name, same=False)
        return family.setdefault(state, [])

    def _decides_so(
        self, deciding: Iterable[ObjectPath], name: str, variant: CachedProgram, spec: StepSpec, host_values: HostValues
    ) -> bool:
        """Whether the step would do the same with containers that are filled otherwise than before.

        Raises:
            ImpureStepError: they change all the time, so that this would have to be looked at all the time.
        """
        now = tuple(outline(place, self._changed) for place in deciding)
        if now not in variant.outlines:
            if len(variant.outlines) > _OUTLINES and len(variant.outlines) * 8 > variant.runs:
                raise ImpureStepError(
                    f"{name} fills {next(iter(deciding))} and looks at what is in there, or changes an entry of it, while it "
                    "becomes longer or shorter all the time: look at it in a hook such as on_train_batch_end; or run eagerly "
                    "(XLATRAIN_EXECUTOR=eager)"
                )
            same = not variant.step.scalars.draws and self._captures.does_the_same(name, variant, spec, host_values)
            variant.outlines[now] = same
        return variant.outlines[now]

    def _would_fit(self, variant: CachedProgram, host_values: HostValues) -> bool:
        """Whether it fits, without any draw made."""
        take_back = variant.step.scalars.draws.try_out(host_values.numbers) if variant.step.scalars.draws else None
        try:
            return variant.fits(host_values, self._changed)
        finally:
            if take_back is not None:
                take_back()

    def _audit_before_draws(
        self,
        name: str,
        variant: CachedProgram,
        spec: StepSpec,
        host_values: HostValues,
        take_back: Callable[[], None] | None,
    ) -> bool:
        """Audit with the random generators where the step finds them."""
        if take_back is not None:
            take_back()
        if not self._captures.audit(name, variant, spec, host_values):
            return False
        if take_back is not None:
            variant.step.scalars.draws.make(host_values.numbers)
        return True

    def note_replayed(self, variant: CachedProgram) -> None:
        """Note that the side effects of a step were replayed: what it assigns anew was assigned."""
        self._guards.note_replayed(variant.rebound)

    def _check_carried(self, name: str, fixed: Hashable, step: CapturedStep) -> None:
        """Refuse a step that carries state from one batch to the next in attributes.

        A flag that is set once makes two variants; more show that the value changes all the time.
        """
        constant, both = self._guards.carried(name, step.effects, list(step.capture.constants.values()), step.caches)
        same = [one for one in self._all(lambda key: key[0] == fixed) if one.step.scalars.outcomes == step.scalars.outcomes]
        count = len(same)  # other outcomes are other steps
        places = places_of(step.capture.constants.values(), step.effects.records, self._changed)
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

    def _stored(self, name: str, tensor: torch.Tensor) -> tuple[CarriedPlace, ...]:
        """The places of values that steps of this name have stored and nobody has read yet, if one of them is ``tensor``."""
        records = [record for one in self._all(lambda key: key[0][0] == name) for record in one.step.effects.records]
        if not places_of([tensor], records, self._changed):
            return ()
        return unread_places(records, self._changed)

    def _all(self, wanted: Callable[[Any], bool]) -> list[CachedProgram]:
        found = [variants for key, family in self._variants.items() if wanted(key) for variants in family.values()]
        return list({variant: None for variants in found for variant in variants})

    def _count(self, name: str, new: bool, compiled_before: bool) -> None:
        self._log.variants += new
        self._log.taken += new and compiled_before
        self._check_asked(name)
        count = sum(one.padding is None for one in self._all(lambda key: key[0][0] == name))
        if count > _MAX_VARIANTS:
            raise ImpureStepError(
                f"{name} needed more than {_MAX_VARIANTS} compiled variants; lately because of {self._log.recompilations[-1]}. "
                "A host value that the step reads changes all the time, or the batches' shapes do: pad the batches to few "
                "lengths (torch_compat.utilities.padding), and keep changing values in tensors or in plain number attributes."
            )

    def _count_taken_over(self, variant: CachedProgram) -> None:
        if variant.program in self._taken_over:
            self._taken_over.remove(variant.program)
            self._log.variants += 1
            self._log.taken += 1

    def _check_asked(self, name: str) -> None:
        """Refuse a step that asks for values of which there are too many.

        Raises:
            ImpureStepError: it was captured for many, and few of them have come again.
        """
        own = [one for one in self._all(lambda key: key[0][0] == name) if one.padding is None]
        variants = [one for one in own if one.step.scalars.asked or one.step.scalars.assumed]
        if len(variants) <= _MAX_ASKED or sum(one.runs for one in variants) >= 2 * len(variants):
            return
        asked = variants[-1].step.scalars
        texts = dict.fromkeys(one.text for one in (*asked.asked, *asked.assumed))
        raise ImpureStepError(
            f"{name} asks for too many different values: it was compiled for {len(variants)} of them, and "
            f"few have come again. It asks for {'; '.join(list(texts)[:3])}\n  Fix: compute with tensors of fixed sizes "
            "(torch.where), let x[mask] end in a sum, a mean or a loss, or pad batches so that sizes come again "
            "(torch_compat.utilities.padding)"
        )

    def _facts(self, name: str, static: Hashable, batch: PlacedBatch, step: CapturedStep) -> dict[str, str]:
        """The facts that the program just captured depends on, in the user's words."""
        facts = batch.facts()
        facts.update({f"{one}.requires_grad": str(flag) for one, flag in zip(self._model.params, self._trainable(), strict=True)})
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
        self._trainable_number()
        return self._flags

    def _trainable_number(self) -> int:
        """A number for the ``requires_grad`` flags, of which a large model has thousands; read again only after one was set."""
        if self._flags_seen != self._model.live.flags_changed:
            self._flags = self._model.requires_grad()
            self._flags_seen = self._model.live.flags_changed
            self._flags_number = self._flags_numbers.setdefault(self._flags, len(self._flags_numbers))
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

    def run(self, variant: CachedProgram, *args: Any) -> Any:
        """Run its program, which compiles it the first time."""
        variant.runs += 1
        if variant.runs > 1 or variant.compiled:
            result = variant.program(*args)
            if variant.block is not None:
                variant.block.settle()
            return result
        with self._compiling(), warnings.catch_warnings():
            # The gradients of an accumulation window are donated with the state, though nothing takes their place.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            result = first_run(variant.program, *args)
        variant.block = block_of(variant.program)
        return result
