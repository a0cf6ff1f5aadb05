"""The captured and compiled forms of a module's steps, and which of them a batch needs.

That depends on the batch's structure and shapes, and on what the host changed since a form was captured: ``training`` flags,
``requires_grad``, attributes that the step read, the optimizer's flags.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import re
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
import torch

from torch_compat.core.toggling import noting_toggled
from torch_compat.functional.batch_texts import KEY as BATCH_TEXTS
from torch_compat.functional.captured_step import CapturedStep
from torch_compat.functional.effects import Place, forgotten, outline
from torch_compat.functional.generators import same_state
from torch_compat.functional.host.scalar_plan import Env
from torch_compat.functional.host.scalars import ScalarTracer
from torch_compat.functional.metrics.calls import MetricsImportedError
from torch_compat.functional.model_state import ModelState
from torch_compat.functional.reads.guards import HostGuards
from torch_compat.functional.reads.surroundings import Surroundings
from torch_compat.functional.reads.user_objects import may_be_followed
from torch_compat.functional.step_capture import as_it_runs, digest_of
from torch_compat.trainer.execution.placed_batch import PlacedBatch
from torch_compat.trainer.execution.recompilation import Recompilations
from torch_compat.trainer.report import ExecutorLog
from xlatrain import host_memory
from xlatrain.bridge.constants import BakedTensor
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.tape import NotRecordable
from xlatrain.precision import matmul_precision

_AUDITED_RUNS = frozenset({1, 16, 128, 1024, 8192, 65536})
_MAX_VARIANTS = 64
_OUTLINES = 16
_T = TypeVar("_T")

UserStep = Callable[[Any, ScalarTracer], Any]
"""Calls the user's method with a batch and the tracer's counters."""


class NamedStatic(tuple[tuple[str, Hashable], ...]):
    """What else decides about a program: pairs of a name that the user knows and a value."""

    __slots__ = ()

    def joined(self, others: tuple[Hashable, ...]) -> Hashable:
        """These and other values that have the usual names of a training step."""
        return (*others, self) if self else others


NO_FACTS = NamedStatic()


class ImpureStepError(CaptureError):
    """The step's Python does something else from one batch to the next, in a way that a compiled step cannot follow."""


@dataclass
class Variant:
    """One captured and compiled form of a step.

    Attributes:
        outlines: whether the step does the same where the containers that decide about it look so.
        second: whether it took the place of one that did what a step does the first time only (it makes a list, say).
        branches_on_draws: whether it can only be told after its random draws whether it is the right one.
        outdated: whether tensors that it baked in have other values now.
    """

    step: CapturedStep
    program: Callable[..., Any]
    runs: int = 0
    second: bool = False
    constants: list[BakedTensor] = field(default_factory=list)
    rebound: frozenset[tuple[str, str]] = frozenset()
    outlines: dict[Hashable, bool] = field(default_factory=dict)
    branches_on_draws: bool = False
    outdated: bool = False

    def draw(self, env: Env) -> Callable[[], None] | None:
        """Make the step's random draws; gives a function that takes them back where that may become necessary."""
        draws = self.step.scalars.draws
        if not draws:
            return None
        if self.branches_on_draws or self.runs in _AUDITED_RUNS:
            return draws.try_out(env)
        return draws.make(env)

    def look_again(self) -> None:
        """A pass over batches begins: tensors that it baked in may have changed since the last one."""
        self.outdated = self.outdated or not all(tensor.is_whole() for tensor in self.constants)

    def fits(self, env: Env, changed: Mapping[str, Any]) -> bool:
        """Whether the host is as the capture assumed: the loop's counters, tensors that it baked in, containers that it fills."""
        if self.outdated:
            return False
        for tensor in self.constants:
            if not tensor.is_unchanged():
                return False
        if self.step.effects.assume and not self.step.effects.fit(changed):
            return False
        return self.step.scalars.holds(env)


class Variants:
    """All variants of one module's steps in one run.

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
        self._guards = HostGuards(model.module, roots)
        self._surroundings = Surroundings(model.module, roots)
        self._log = log
        self._tell_compiling = compiling
        self._variants: dict[Hashable, dict[int, list[Variant]]] = {}  # by state of the surroundings
        self._deciding: dict[str, dict[Place, None]] = {}  # containers on whose contents a step's effects may depend
        self._as_they_run: set[str] = set()  # names of steps that cannot be recorded
        self._flags_seen = -1
        self._flags: tuple[bool, ...] = ()
        self._flags_numbers: dict[tuple[bool, ...], int] = {}
        self._flags_number = 0
        self._recompilations = Recompilations(log, no_recompilation_after)

    def add_function(self, name: str, function: Callable[..., Any]) -> None:
        """The step ``name`` is a function, no method of the module's."""
        self._surroundings.add_function(name, function)

    def following(self) -> contextlib.AbstractContextManager[None]:
        """Around a whole run: what the host assigns to modules is followed."""
        return self._guards.following()

    def look_again(self) -> None:
        """Find what the host changed in ways that are not followed; not for every step."""
        self._guards.look_again()
        for family in self._variants.values():
            for variant in [one for variants in family.values() for one in variants]:
                variant.look_again()

    def find(
        self,
        name: str,
        static: Hashable,
        batch: PlacedBatch,
        env: Env,
        recapture: Callable[[], CapturedStep],
        build: Callable[[CapturedStep], Callable[..., Any]],
    ) -> Variant:
        """The variant for this batch and these host values; captured and built if there is none yet.

        Args:
            name: of the user's method.
            static: what else decides about the program (its mode, optimizer flags, the index of the dataloader).
            batch: on the mesh.
            env: the loop's counters.
            recapture: captures the step with the host values of this moment.
            build: makes the program of a captured step.

        Raises:
            CaptureError: the step cannot be captured, or does something else from batch to batch.
        """
        self._model.push_writes()
        if self._surroundings.structure_changed():
            self._guards.find_owners()
            self._model.find_tensors()
        self._guards.look(name)
        fixed = (name, static, self._trainable_number(), batch.key())
        env[BATCH_TEXTS] = batch.spec.others
        key = self._guards.key(name)
        self._guards.fill(name, env)
        replaced = False
        family = self._variants.get((fixed, key))
        variants = self._in_state(name, family, recapture, env) if family else []
        deciding = self._deciding.get(name)
        for variant in variants:
            if not variant.branches_on_draws and not variant.fits(env, self._changed):
                continue
            if deciding and not self._decides_so(deciding, name, variant, recapture):
                continue
            take_back = variant.draw(env)
            if not variant.branches_on_draws or variant.fits(env, self._changed):
                if variant.runs not in _AUDITED_RUNS or self._audit_before_draws(name, variant, recapture, env, take_back):
                    return variant
                variants.remove(variant)
                replaced = True
                break
            if take_back is not None:
                take_back()
        with self._compiling():
            variant = self._make_variant(name, fixed, env, recapture, build, second=replaced)
        compiled = not any(one.program is variant.program for one in self._all(lambda key: True))
        state = self._surroundings.state(name, lambda: self._guards.values(name))
        self._variants.setdefault((fixed, self._guards.key(name)), {}).setdefault(state, []).append(variant)
        self._count(name, compiled)
        facts = self._facts(name, static, batch, variant.step)
        facts = {**facts, "what the step does": "as from its second run on"} if replaced else facts
        self._recompilations.note(name, facts, compiled=compiled)
        return variant

    def _make_variant(
        self,
        name: str,
        fixed: Hashable,
        env: Env,
        recapture: Callable[[], CapturedStep],
        build: Callable[[CapturedStep], Callable[..., Any]],
        *,
        second: bool,
    ) -> Variant:
        """The form of the step for the host values of this moment, with its draws made."""
        self._guards.promote(name)
        self._guards.fill(name, env)
        step = self._first_capture(name, recapture)
        self._surroundings.skip(name, step.effects.containers(self._changed))
        if step.scalars.draws:
            step.scalars.draws.make(env)
        variant = Variant(step, build(step), second=second, branches_on_draws=step.scalars.branch_on_draws(env))
        variant.rebound = step.effects.attributes(rebound=True)
        if step.effects.fill_containers:
            self._deciding.setdefault(name, {}).update(dict.fromkeys(step.effects.depend_on(self._surroundings.looked_at(name))))
        if deciding := self._deciding.get(name):
            variant.outlines[tuple(outline(place, self._changed) for place in deciding)] = True
        self._check_rewritten(name, fixed, step, variant.rebound)
        variant.constants = [BakedTensor(one, self._guards.name_of(name, one)) for one in step.capture.constants.values()]
        return variant

    def _in_state(
        self, name: str, family: dict[int, list[Variant]], recapture: Callable[[], CapturedStep], env: Env
    ) -> list[Variant]:
        """The variants of a family that were captured in the present surroundings, or in others that make no difference."""
        state = self._surroundings.state(name, lambda: self._guards.values(name))
        if state in family or not family:
            return family.setdefault(state, [])
        with self._compiling():
            for before, variants in list(family.items()):
                if self._surroundings.comparable(name, before, state) and any(
                    self._is_the_same(name, variant, recapture) for variant in variants if self._would_fit(variant, env)
                ):
                    self._surroundings.note(name, same=True)
                    family[state] = variants
                    return variants
        self._surroundings.note(name, same=False)
        return family.setdefault(state, [])

    def _decides_so(self, deciding: Iterable[Place], name: str, variant: Variant, recapture: Callable[[], CapturedStep]) -> bool:
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
            variant.outlines[now] = not variant.step.scalars.draws and self._repeats(name, variant, recapture)
        return variant.outlines[now]

    def _would_fit(self, variant: Variant, env: Env) -> bool:
        """Whether it fits, without any draw made."""
        take_back = variant.step.scalars.draws.try_out(env) if variant.step.scalars.draws else None
        try:
            return variant.fits(env, self._changed)
        finally:
            if take_back is not None:
                take_back()

    def _is_the_same(self, name: str, variant: Variant, recapture: Callable[[], CapturedStep]) -> bool:
        return self._repeats(name, variant, recapture) or self._capture(name, recapture).fingerprint == variant.step.fingerprint

    def traced(self, call: UserStep, env: Env) -> UserStep:
        """The user's method, called so that its reads and draws are followed."""

        def traced(batch: Any, tracer: ScalarTracer) -> Any:
            with self._guards.reading(tracer, env):
                return call(batch, tracer)

        return traced

    def _first_capture(self, name: str, recapture: Callable[[], CapturedStep]) -> CapturedStep:
        """Capture with changing numbers as inputs; as constants with guards, where the step cannot take them so."""
        try:
            return self._capture(name, recapture)
        except Exception:
            if not self._guards.demote(name):
                raise
        return self._capture(name, recapture)

    def _audit_before_draws(
        self, name: str, variant: Variant, recapture: Callable[[], CapturedStep], env: Env, take_back: Callable[[], None] | None
    ) -> bool:
        """Audit with the random generators where the step finds them."""
        if take_back is not None:
            take_back()
        if not self._audit(name, variant, recapture):
            return False
        if take_back is not None:
            variant.step.scalars.draws.make(env)
        return True

    def note_replayed(self, variant: Variant) -> None:
        """The side effects of a step were replayed: what it assigns anew was assigned."""
        self._guards.note_replayed(variant.rebound)

    def _capture(self, name: str, recapture: Callable[[], _T]) -> _T:
        """Capture; what the step changes outside of the objects whose side effects are followed is followed from then on."""
        forget_toggled = noting_toggled(self._model.module)
        step, changed = self._captured(name, recapture)
        if new := {text: value for text, value in changed.items() if text not in self._changed and may_be_followed(value)}:
            self._changed.update(new)
            for text, value in new.items():
                self._guards.follow(text, value)
            forget_toggled()
            step, changed = self._captured(name, recapture)
        self._surroundings.refuse_changes(name, changed)
        return step

    def _captured(self, name: str, recapture: Callable[[], _T]) -> tuple[_T, dict[str, Any]]:
        """Run the step for a capture; again where that was in vain, with all that it did taken back."""
        forget_toggled = noting_toggled(self._model.module)
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

    def _check_rewritten(self, name: str, fixed: Hashable, step: CapturedStep, rebound: frozenset[tuple[str, str]]) -> None:
        """Refuse a step that carries state from one batch to the next in attributes.

        A flag that is set once makes two variants; more show that the value changes all the time.
        """
        self._guards.note_rewritten(name, step.effects.attributes())
        both = self._guards.reads_before(name, rebound)
        place = self._guards.holds_constant(name, list(step.capture.constants.values()))
        count = self._number_of(lambda key: key[0] == fixed)
        if place is None and not (both and count >= 2):
            return
        raise ImpureStepError(
            f"{name} reads {place or ', '.join(both)} and changes it for the next batch, which is not a part of the compiled "
            "step's state. Keep it in a buffer (self.register_buffer), or change it in a hook such as on_train_batch_end; or run "
            "eagerly (XLATRAIN_EXECUTOR=eager)."
        )

    def _audit(self, name: str, variant: Variant, recapture: Callable[[], CapturedStep]) -> bool:
        """Run the step's Python once more with today's host values: a pure step gives the same graph, logs and side effects.

        False: its first run made a list or dict that the next ones fill; what it does from now on may be always the same.
        """
        if self._repeats(name, variant, recapture):
            return True
        again = self._capture(name, recapture)  # the same graph can come of other ops, and an error shall say what differs
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

    def _repeats(self, name: str, variant: Variant, recapture: Callable[[], CapturedStep]) -> bool:
        """Whether another capture gives the same, found without making a graph."""
        with contextlib.suppress(Exception):  # a second capture, which needs no fake results, will tell
            if self._capture(name, lambda: digest_of(recapture)) == variant.step.digest:
                return True
        with contextlib.suppress(Exception), forgotten(variant.step.effects, self._changed) as any_entry:
            return any_entry and self._capture(name, lambda: digest_of(recapture)) == variant.step.digest
        return False

    def _all(self, wanted: Callable[[Any], bool]) -> Iterable[Variant]:
        found = [variants for key, family in self._variants.items() if wanted(key) for variants in family.values()]
        return {id(variant): variant for variants in found for variant in variants}.values()

    def _number_of(self, wanted: Callable[[Any], bool]) -> int:
        return len(list(self._all(wanted)))

    def _count(self, name: str, compiled: bool) -> None:
        self._log.variants += compiled
        count = self._number_of(lambda key: key[0][0] == name)
        if count > _MAX_VARIANTS:
            raise ImpureStepError(
                f"{name} needed more than {_MAX_VARIANTS} compiled variants; lately because of {self._log.recompilations[-1]}. "
                "A host value that the step reads changes all the time, or the batches' shapes do: pad the batches to few "
                "lengths (torch_compat.utilities.padding), and keep changing values in tensors or in plain number attributes."
            )

    def _facts(self, name: str, static: Hashable, batch: PlacedBatch, step: CapturedStep) -> dict[str, str]:
        """What the variant just captured depends on, in the user's words."""
        facts = batch.facts()
        facts.update({f"{one}.requires_grad": str(flag) for one, flag in zip(self._model.params, self._trainable(), strict=True)})
        facts.update(self._guards.facts(name))
        facts.update({f"`{guard.text.removesuffix(' ==')}`": repr(guard.outcome) for guard in step.scalars.guards})
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
        """Stands for the flags, of which a large model has thousands; they are read again only after one was set."""
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

    def run(self, variant: Variant, *args: Any) -> Any:
        """Run its program, which compiles it the first time."""
        variant.runs += 1
        if variant.runs > 1:
            return variant.program(*args)
        with self._compiling(), warnings.catch_warnings():
            # The gradients of an accumulation window are donated with the state, though nothing takes their place.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            jax.block_until_ready(args)  # parameters may still be on their way into stacks
            host_memory.give_back_freed()  # what initialization and the capture needed is no use to the step
            if hasattr(variant.program, "lower"):  # else it is compiled already
                variant.program.lower(*args).compile()  # which the call below finds done
            host_memory.give_back_freed()  # nor is what the compiler needed
            return variant.program(*args)


def _host_random_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _restore_host_random_state(before: tuple[Any, Any]) -> bool:
    """Put the generators back to where they were, so that whoever repeats the draws gets the same; whether there were any."""
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
