"""Optimizers and schedulers while a step is captured.

The user's Python meets the objects that it knows, with three differences: ``optimizer.step()`` becomes a node of the graph,
numbers in ``param_groups`` and of schedulers are :class:`~torch_compat.step.host.scalars.HostScalar`s, and
``scheduler.step()`` and writes to ``param_groups`` are noted in a :class:`~torch_compat.step.optimizers.host_actions.HostPlan`.
Afterwards all is as it was.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch.optim.lr_scheduler import LRScheduler

from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.host.host_values import Readers
from torch_compat.step.host.scalars import HostScalar, ScalarTracer
from torch_compat.step.host.tensor_scalars import TensorScalars
from torch_compat.step.optimizers.host_actions import (
    HostExpression,
    HostPlan,
    Read,
    SetNumber,
    SetOption,
    StepInline,
    StepOptimizer,
    StepScheduler,
    set_option,
)
from torch_compat.step.optimizers.inline import InlineKey, InlineOptimizer, InlineResult, Layouts, StateKey, traceable
from torch_compat.step.optimizers.param_group import frozen
from torch_compat.step.optimizers.state_layout import as_array
from torch_compat.step.optimizers.stray_steps import stray_steps_refused
from torch_compat.step.values.own_dict import OwnDict
from xlatrain.bridge.capture.updates import update_node
from xlatrain.bridge.errors import CaptureError, user_line
from xlatrain.bridge.patches import patched


@dataclass(frozen=True)
class UpdateCall:
    """An optimizer step in a captured graph: the ``index``-th optimizer, for the parameters ``names``, which had gradients."""

    index: int
    names: tuple[str, ...]


def _nothing() -> None:
    """Nothing is left to be done."""


@dataclass
class OptimizerTrace:
    """The findings of one capture about optimizers.

    Attributes:
        calls: the optimizer steps, in order.
        tokens: outputs that keep the update nodes in the graph.
        plan: what happens on the host.
        layouts: of the states of optimizers whose Python ran in the step, by index.
        states: the tensors of these, outputs of the graph.
        finish: to be called at the end of the step's Python, before what it calls on the host is known.
    """

    calls: list[UpdateCall] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)
    plan: HostPlan = field(default_factory=HostPlan)
    layouts: dict[int, Layouts] = field(default_factory=dict)
    states: dict[InlineKey, torch.Tensor] = field(default_factory=dict)
    finish: Callable[[], None] = field(default=_nothing, repr=False)
    collectors: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def collect(self) -> list[torch.Tensor]:
        """Find what states the step leaves, at its end."""
        for one in self.collectors:
            one()
        return list(self.states.values())

    def with_states(self, opt_state: Mapping[str, Mapping[str, Any]], arrays: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """The state of all optimizers, with ``arrays`` as those of optimizers whose Python ran in the step. Pure."""
        own = {str(index) for index in self.layouts}
        new = {name: {index: one for index, one in held.items() if index not in own} for name, held in opt_state.items()}
        for (index, name, path), array in zip(self.states, arrays, strict=True):
            new.setdefault(name, {}).setdefault(str(index), {})[path] = as_array(array)
        return new

    def fingerprint(self) -> str:
        """The calls and host actions as text, which must be the same in every capture of the step."""
        return f"{self.calls}\n{self.plan.text()}\n{list(self.states)}"


class TracedOptimizers:
    """Puts the stand-ins of a run's optimizers and schedulers in place.

    Args:
        optimizers: of the run.
        schedulers: of the run, as ``lr_schedulers()`` gives them; others are found when they are used.
        names: parameter → its name.
        may_step: whether ``optimizer.step()`` is the step's affair (manual optimization).
        inline: the optimizers whose Python runs in the step, by index.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        names: Mapping[torch.Tensor, str],
        *,
        may_step: bool,
        inline: Mapping[int, InlineOptimizer] | None = None,
    ) -> None:
        self.readers: Readers = {}
        self._inline = inline or {}
        self._optimizers = list(optimizers)
        self._schedulers = list(schedulers)
        self._names = names
        self._may_step = may_step

    @contextlib.contextmanager
    def traced(
        self, tracer: ScalarTracer, values: Mapping[str, torch.Tensor], states: Mapping[InlineKey, torch.Tensor] | None
    ) -> Iterator[OptimizerTrace]:
        """Put stand-ins for the optimizers in place, while a step is captured with ``values`` in place of the parameters.

        Args:
            states: in place of the states of optimizers whose Python runs in the step; None where none runs in it.

        Raises:
            CaptureError: the step changed what a compiled step cannot change, as ``finish`` of the trace tells.
        """
        capture = _Capture(self, tracer, values)
        with contextlib.ExitStack() as stack:
            for index, optimizer in enumerate(self._optimizers):
                if index in self._inline:
                    given = None if states is None else {key[1:]: one for key, one in states.items() if key[0] == index}
                    stack.enter_context(capture.inlined(index, self._inline[index], given))
                else:
                    stack.enter_context(capture.optimizer_stand_in(index, optimizer))
            stack.enter_context(capture.scheduler_stand_ins())
            stack.enter_context(_without_profiler_marks())
            members = [member for one in self._inline.values() for member in one.holders]
            stack.enter_context(stray_steps_refused([*self._optimizers, *members], _refuse))
            capture.trace.finish = capture.finish
            try:
                yield capture.trace
            finally:
                capture.trace.finish = _nothing  # the capture holds the run


class _Capture:
    """The state of one capture."""

    def __init__(self, owner: TracedOptimizers, tracer: ScalarTracer, values: Mapping[str, torch.Tensor]) -> None:
        self.trace = OptimizerTrace()
        self._owner = owner
        self._tracer = tracer
        self._values = values
        self._groups: list[list[dict[str, Any]]] = []
        self._seen: list[list[dict[str, Any]]] = []
        self._generation = 0  # how often the step changed options so far
        self._late: dict[int, dict[tuple[int, str], str]] = {}  # options that are set after the step, by optimizer
        self._schedulers: dict[int, tuple[str, Any, dict[str, Any]]] = {}
        for index, scheduler in enumerate(owner._schedulers):
            self._know(scheduler, f"lr_schedulers[{index}]")

    # -- optimizers --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def optimizer_stand_in(self, index: int, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The optimizer with traced options and a ``step`` that is captured."""
        own = {key: value for key, value in vars(optimizer).items() if key in ("param_groups", "state", "step")}
        groups: list[dict[str, Any]] = [OwnDict(group) for group in optimizer.param_groups]
        self._groups.append(groups)
        self._seen.append([dict(group) for group in groups])
        self._wrap_options(index, optimizer.param_groups)
        optimizer.param_groups = groups
        optimizer.state = _HiddenState(index)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step = functools.partial(self._step, index)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            if "step" not in own:
                del optimizer.step
            vars(optimizer).update(own)

    @contextlib.contextmanager
    def inlined(self, index: int, inline: InlineOptimizer, given: Mapping[StateKey, torch.Tensor] | None) -> Iterator[None]:
        """The optimizer with traced options and states, whose own ``step`` runs; without states where there are none given."""
        shared = inline.shared()

        def number_of(key: StateKey) -> HostScalar:
            first = shared[key]
            reader = functools.partial(_number_of, inline, first)
            name = _name_of_number(index, first)
            self._owner.readers[name] = reader
            return HostScalar(self._tracer, lambda host_values: host_values.numbers[name], name, inline.numbers[first])

        def stepped() -> None:
            if not self._owner._may_step:
                _refuse(f"calls {type(inline.optimizer).__name__}.step() although automatic optimization does")
            self._note_options(index)
            self.trace.plan.actions.append(StepInline(index))

        hidden = _HiddenState(index) if given is None else None
        with inline.traced(given or {}, number_of, stepped, hidden) as collect, TensorScalars():
            groups = inline.groups_now()
            for group in groups:
                group.update(traceable(group))
            self._groups.append(groups)
            self._seen.append([dict(group) for group in groups])
            self._wrap_options(index, self._seen[index])
            if given is not None:
                self.trace.collectors.append(lambda: self._take(index, inline, shared, collect()))
            yield

    def _take(self, index: int, inline: InlineOptimizer, shared: Mapping[StateKey, StateKey], found: InlineResult) -> None:
        """Add the states that the step leaves to the trace."""
        self.trace.layouts[index] = found.layouts
        for (name, path), tensor in found.tensors.items():
            self.trace.states[index, name, path] = tensor
        for key, value in found.numbers.items():
            text = _name_of_number(index, key)
            new = _deferred(value, text)
            if key not in shared or new.text != _name_of_number(index, shared[key]):
                self.trace.plan.actions.append(SetNumber(functools.partial(_numbers_of, inline), text, key, new))

    def _wrap_options(self, index: int, real: Sequence[Mapping[str, Any]]) -> None:
        """Put host scalars in place of the numbers of an optimizer's groups."""
        for position, (group, options) in enumerate(zip(self._groups[index], real, strict=True)):
            for key, value in options.items():
                if key != "params":
                    name = f"optimizers[{index}].param_groups[{position}][{key!r}]"
                    reader = functools.partial(_option, self._groups_of(index), position, key)
                    if index not in self._owner._inline or self._owner._inline[index].is_input(key, frozen(value)):
                        group[key] = self._wrapped(name, frozen(value), reader)
            self._seen[index][position] = dict(group)

    def _wrapped(self, name: str, value: Any, reader: Callable[[], Any]) -> Any:
        """``value`` with host scalars in place of numbers, alone or in a tuple or list."""
        if _is_number(value):
            return self._number(name, value, reader)
        if isinstance(value, tuple | list) and value and all(map(_is_number, value)):
            entries = (
                self._number(f"{name}[{position}]", one, functools.partial(_entry, reader, position))
                for position, one in enumerate(value)
            )
            return type(value)(entries)
        return value

    def _number(self, name: str, value: Any, reader: Callable[[], Any]) -> HostScalar:
        if self._generation == 0:
            self._owner.readers[name] = reader
            return HostScalar(self._tracer, lambda host_values: host_values.numbers[name], name, value)
        later = f"{name} after {self._generation}"
        self.trace.plan.actions.append(Read(name, later, reader))
        return self._tracer.late(later, value)

    def _step(self, index: int, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """``optimizer.step(closure)`` in the graph."""
        optimizer = self._owner._optimizers[index]
        if not self._owner._may_step:
            _refuse(f"calls {type(optimizer).__name__}.step() although automatic optimization does")
        if kwargs:
            _refuse(f"calls {type(optimizer).__name__}.step({', '.join(f'{key}=…' for key in kwargs)}), which is not compiled")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._note_options(index)
        self._refuse_late(index)
        names = [self._owner._names[param] for group in self._groups[index] for param in group["params"]]
        stepped = [name for name in names if self._values[name].grad is not None]
        self.trace.plan.actions.append(StepOptimizer(index))
        self._add_update(index, stepped)
        return loss

    def _add_update(self, index: int, names: list[str]) -> None:
        params = [self._values[name] for name in names]
        grads = [param.grad for param in params if param.grad is not None]
        scaling = self._tracer.loss_scale
        skip = None if scaling is None else scaling.overflowed
        new, token = update_node(params, grads, len(self.trace.calls), skip)
        self.trace.calls.append(UpdateCall(index, tuple(names)))
        self.trace.tokens.append(token)
        with torch.no_grad():
            for param, value in zip(params, new, strict=True):
                param.copy_(value)

    def _groups_of(self, index: int) -> Callable[[], Sequence[dict[str, Any]]]:
        """The function that gives the param groups of an optimizer."""
        if (inline := self._owner._inline.get(index)) is not None:
            return inline.groups
        return functools.partial(getattr, self._owner._optimizers[index], "param_groups")

    def _note_options(self, index: int) -> None:
        """Add what the step's Python wrote into an optimizer's groups to the plan."""
        optimizer = self._owner._optimizers[index]
        inline = self._owner._inline.get(index)
        groups = optimizer.param_groups if inline is None else inline.groups_now()
        known = self._groups[index]
        same = len(groups) == len(known) == len(self._seen[index]) and all(map(operator.is_, groups, known))
        if not same or any(_members(g) != _members(s) for g, s in zip(groups, self._seen[index], strict=True)):
            _refuse(f"adds parameters or groups to {type(optimizer).__name__}, or replaces its param_groups")
        for position, (group, seen) in enumerate(zip(groups, self._seen[index], strict=True)):
            if missing := seen.keys() - group.keys():
                _refuse(f"deletes {sorted(missing)} from {type(optimizer).__name__}.param_groups[{position}]")
            for key, value in group.items():
                if key not in seen or seen[key] is not value:
                    name = f"optimizers[{index}].param_groups[{position}][{key!r}]"
                    if _comes_later(value):
                        self._late.setdefault(index, {})[position, key] = name
                        continue
                    self._late.get(index, {}).pop((position, key), None)
                    new = _deferred(value, name)
                    self.trace.plan.actions.append(SetOption(self._groups_of(index), name, position, key, new))
                    self._generation += 1
            self._seen[index][position] = dict(group)

    def _refuse_late(self, index: int) -> None:
        """Refuse options that the host has after the step only, where it needs them before."""
        for name in self._late.get(index, {}).values():
            _refuse(f"sets {name} to a number that it computed, and then steps with it")

    def _set_late(self, index: int) -> None:
        """Have the options that the step computed set when it has run: the next one reads them."""
        inline = self._owner._inline.get(index)
        groups = self._owner._optimizers[index].param_groups if inline is None else inline.groups_now()
        for (position, key), name in self._late.get(index, {}).items():
            value = groups[position][key]
            first = next(one for one in pytree.tree_leaves(value) if _is_future(one))
            function = functools.partial(_set_option, self._groups_of(index), position, key)
            first.call_later(function, value, text=f"{name} =")

    # -- schedulers --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scheduler_stand_ins(self) -> Iterator[None]:
        """Every ``LRScheduler``, and every other scheduler of the run, with a ``step`` that is noted."""
        original = LRScheduler.__getattribute__
        capture = self

        def traced_attribute(scheduler: LRScheduler, name: str) -> Any:
            value = original(scheduler, name)
            if name.startswith("__") or name in ("optimizer", "state_dict"):
                return value
            label = capture._know(scheduler)
            if name == "step":
                return functools.partial(capture._step_scheduler, scheduler, label)
            if name in vars(scheduler):
                return capture._wrapped(f"{label}.{name}", value, functools.partial(_attribute, scheduler, name))
            return value

        others = [one for one in self._owner._schedulers if not isinstance(one, LRScheduler)]
        patches: list[tuple[Any, str, Any]] = [(LRScheduler, "__getattribute__", traced_attribute)]
        patches += [(one, "step", functools.partial(self._step_scheduler, one, self._know(one))) for one in others]
        with patched(patches):
            yield

    def _know(self, scheduler: Any, label: str = "") -> str:
        """The scheduler's name; how it looks when it is first met is remembered."""
        if id(scheduler) not in self._schedulers:
            name = label or f"{type(scheduler).__name__}[{len(self._schedulers)}]"
            self._schedulers[id(scheduler)] = (name, scheduler, dict(_contents(scheduler)))
        return self._schedulers[id(scheduler)][0]

    def _step_scheduler(self, scheduler: Any, label: str, *args: Any, **kwargs: Any) -> None:
        for index in range(len(self._groups)):
            self._note_options(index)
            self._refuse_late(index)
        given = tuple(_deferred(value, f"{label}.step's argument") for value in args)
        named = {key: _deferred(value, f"{label}.step's argument {key}") for key, value in kwargs.items()}
        self.trace.plan.actions.append(StepScheduler(scheduler, label, given, named))
        self._generation += 1
        for index, groups in enumerate(self._groups):
            self._wrap_options(index, [_numbers_again(group) for group in groups])

    def finish(self) -> None:
        """The end of the step's Python."""
        for index in range(len(self._groups)):
            self._note_options(index)
            self._set_late(index)
        for name, scheduler, before in self._schedulers.values():
            now = _contents(scheduler)
            changed = [key for key in now.keys() | before.keys() if now.get(key) is not before.get(key)]
            changed = [key for key in changed if key != "step"]
            if changed:
                now.clear()
                now.update(before)
                _refuse(f"changes {name}.{changed[0]} of {type(scheduler).__name__}")


class _HiddenState:
    """An optimizer's ``state`` while a step is captured: it lives on the mesh."""

    def __init__(self, index: int) -> None:
        self._index = index

    def _raise(self, *args: Any) -> NoReturn:
        _refuse(f"reads or writes optimizers[{self._index}].state, which is on the mesh")

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._raise()


def _refuse(what: str, where: str | None = None) -> NoReturn:
    where = where or user_line(traceback.extract_stack()) or "training_step"
    raise CaptureError(
        f"{where}\n  cannot be captured: the step {what}.\n"
        "  Fix: do it in a hook outside of the step (on_train_batch_end, …), or run eagerly (XLATRAIN_EXECUTOR=eager)."
    )


def _option(groups: Callable[[], Sequence[dict[str, Any]]], group: int, key: str) -> Any:
    """An option of a group: its number, also while a capture has a host scalar in its place."""
    return _number_again(frozen(groups()[group][key]))


def _set_option(groups: Callable[[], Sequence[dict[str, Any]]], group: int, key: str, value: Any) -> None:
    set_option(groups()[group], key, value)


def _is_future(value: Any) -> bool:
    return type(value) is HostFuture


def _comes_later(value: Any) -> bool:
    """Whether it is a number that the host has after the step, or holds one."""
    return any(map(_is_future, pytree.tree_leaves(value)))


def _number_of(inline: InlineOptimizer, key: StateKey) -> Any:
    return inline.numbers[key]


def _numbers_of(inline: InlineOptimizer) -> dict[StateKey, Any]:
    return inline.numbers


def _name_of_number(index: int, key: StateKey) -> str:
    return f"optimizers[{index}].state[{key[0]!r}][{key[1]!r}]"


def _attribute(owner: Any, name: str) -> Any:
    return vars(owner)[name]


def _entry(reader: Callable[[], Any], position: int) -> Any:
    return reader()[position]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _contents(owner: Any) -> dict[str, Any]:
    return object.__getattribute__(owner, "__dict__")


def _members(group: Mapping[str, Any]) -> list[int]:
    return [id(param) for param in group["params"]]


def _numbers_again(group: Mapping[str, Any]) -> dict[str, Any]:
    """A traced group with numbers (no longer right) in place of host scalars."""

    return {key: value if key == "params" else _number_again(value) for key, value in group.items()}


def _number_again(value: Any) -> Any:
    if type(value) is HostScalar:
        return value._value
    if isinstance(value, tuple | list):
        return type(value)(_number_again(one) for one in value)
    return value


def _deferred(value: Any, name: str) -> HostExpression:
    """The expression that the host computes in each step for a value of the captured step's Python."""
    if type(value) is HostScalar:
        return HostExpression(*value.deferred())
    if isinstance(value, torch.Tensor):
        _refuse(f"gives {name} a tensor that it computed, whose value the host has after the step only")
    if isinstance(value, tuple | list):
        entries = [_deferred(one, name) for one in value]
        kind = type(value)
        return HostExpression(
            lambda host_values: kind(one.of(host_values) for one in entries), f"({', '.join(one.text for one in entries)})"
        )
    if _is_number(value) or isinstance(value, str | type(None)):
        return HostExpression.constant(value)
    if isinstance(value, bool):
        _refuse(f"sets the flag {name}")
    _refuse(f"sets {name} to {type(value).__name__}")


@contextlib.contextmanager
def _without_profiler_marks() -> Iterator[None]:
    """``zero_grad()`` marks itself for torch's profiler; such marks stay out of the graph."""
    with patched([(torch.autograd.profiler, "record_function", lambda *_: contextlib.nullcontext())]):
        yield
