"""``fabric.compile``: a user's whole step, with its backward passes and optimizer steps, as one program."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import jax
from torch.nn import Module
from torch.optim import Optimizer

from torch_compat.fabric.wrappers import unwrap
from torch_compat.run.batches import flatten_batch
from torch_compat.step.capture.cached_program import NamedStatic, StepName
from torch_compat.step.guards.fingerprints import fingerprint
from torch_compat.step.host.host_values import HostNumbers, HostValues
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.mesh_steps import UpdatingStep
from torch_compat.step.optimizers.host_part import HostPart
from torch_compat.step.values.marks import same
from torch_compat.step.values.user_objects import is_user_object
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.bridge.errors import CaptureError, is_user_file

if TYPE_CHECKING:
    from torch_compat.fabric.fabric import Fabric
    from torch_compat.fabric.steps import FabricSteps

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)


class CompiledFunction:
    """A user's function; each call runs one program, which is captured at the first call and when something else is needed.

    Args:
        fabric: whose modules and optimizers the function uses.
        function: ``(batch, …) -> anything``; see :meth:`~torch_compat.fabric.fabric.Fabric.compile`.
    """

    def __init__(self, fabric: Fabric, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._fabric = fabric
        self._function = function
        self._name = StepName(getattr(function, "__qualname__", repr(function)).rpartition("<locals>.")[2])
        self._signature = inspect.signature(function)
        self._host_parts: MutableMapping[FabricSteps, HostPart] = WeakKeyDictionary()
        self._followed: WeakSet[FabricSteps] = WeakSet()
        weakref.finalize(self, _forget, self._followed, self._name)
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._fabric._model
        if model.on_host or model.tracer is not None:
            return self._function(*args, **kwargs)
        self._check_set_up()
        try:
            return self._run(args, kwargs)
        except Exception as error:
            return model.run_again(error, lambda: self._function(*args, **kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self._fabric._model
        steps = model.steps
        model.check_optimizers()
        self._follow(steps)
        if (host := self._host_parts.get(steps)) is None:
            host = self._host_parts[steps] = HostPart(model.optimizer_set, steps.model.replicate)
        bound = self._signature.bind(*args, **kwargs)
        arguments = _Arguments(self._name, bound, type(self._fabric))
        placed = steps.place(arguments.batch)
        host_values = HostValues(HostNumbers(arguments.numbers, model.run.traced.readers))

        def user(batch: Any, tracer: ScalarTracer) -> Any:
            before = self._values()
            given = arguments.given(batch, tracer)
            found = self._function(*given.args, **given.kwargs)
            if self._put_back(before):
                raise CaptureError(
                    f"{self._name} assigns a variable of the function around it (nonlocal), or a global one, which a compiled "
                    "step would do only once: keep the value in a list, a dict or an attribute, or return it"
                )
            return found

        facts = NamedStatic((*arguments.facts, *self._facts()))
        with model.explained_shortage():
            outcome = steps.run(UpdatingStep(steps, placed, host, host_values, user, self._name, facts))
            if not self._has_run:  # programs run asynchronously: what does not fit shows in the first
                jax.block_until_ready(steps.model.raw_state.params)
                self._has_run = True
        return outcome.result

    # -- what the function reaches besides its arguments -------------------------------------------------------------

    def _reached(self) -> Iterator[tuple[str, Any]]:
        """Name → value of the variables outside of the function that its code, or that of functions that it calls, names."""
        for variable in self._variables():
            value = variable.get()
            if value is not _MISSING:
                yield variable.name, value

    def _variables(self) -> list[_Variable]:
        found: list[_Variable] = []
        todo, known = [self._function], set()
        while todo:
            function = todo.pop()
            function = inspect.unwrap(getattr(function, "__func__", function))
            if not isinstance(function, types.FunctionType) or id(function) in known:
                continue
            known.add(id(function))
            found += (own := _variables_of(function))
            values = [variable.get() for variable in own]
            todo += [one for one in values if isinstance(one, types.FunctionType) and is_user_file(one.__code__.co_filename)]
        return found

    def _values(self) -> list[tuple[_Variable, Any]]:
        return [(variable, variable.get()) for variable in self._variables()]

    def _put_back(self, before: list[tuple[_Variable, Any]]) -> bool:
        """Give variables their former values; returns whether any had changed."""
        changed = [(variable, value) for variable, value in before if not same(variable.get(), value)]
        for variable, value in changed:
            variable.set(value)
        return bool(changed)

    def _facts(self) -> Iterator[tuple[str, Any]]:
        """The plain values that the function reaches: another value is another program."""
        for name, value in self._reached():
            if isinstance(value, (*_PLAIN, tuple)):
                yield f"the variable {name}", fingerprint(value)

    def _follow(self, steps: FabricSteps) -> None:
        if steps in self._followed:
            return
        self._followed.add(steps)
        steps.follow_code(self._name, self._function)
        for name, value in self._reached():
            if isinstance(value, _CONTAINERS) or (is_user_object(value) and not isinstance(value, (Module, Optimizer))):
                steps.follow(self._name, name, value)
        owner = getattr(self._function, "__self__", None)
        if owner is not None and not isinstance(owner, Module):
            steps.follow(self._name, "self", owner)

    def _check_set_up(self) -> None:
        """Refuse modules and optimizers that were not set up."""
        model = self._fabric._model
        for name, value in self._reached():
            thing = unwrap(value)
            trains = isinstance(thing, Module) and any(param.requires_grad for param in thing.parameters())
            if (trains or isinstance(thing, Optimizer)) and not model.knows(thing):
                raise MisconfigurationException(
                    f"fabric.compile({self._name}): {name} ({type(thing).__name__}) was not set up; pass it to fabric.setup(…), "
                    "and use its result in the step"
                )


class _Arguments:
    """The arguments of one call: tensors, numbers, and what decides about the program.

    Attributes:
        batch: the arguments that hold tensors, by name.
        numbers: those that are numbers: inputs of the program.
        facts: all others, fingerprinted.
    """

    def __init__(self, function: str, bound: inspect.BoundArguments, fabric: type) -> None:
        self._bound = bound
        self._prefix = f"argument of {function}: "  # a number's name among the host values
        bound.apply_defaults()
        self.batch: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}
        facts: list[tuple[str, Any]] = []
        for name, value in bound.arguments.items():
            if type(value) in (int, float):
                self.numbers[self._prefix + name] = value
            elif not isinstance(unwrap(value), (Module, Optimizer, fabric)) and flatten_batch(value)[0]:
                self.batch[name] = value
            else:
                facts.append((f"the argument {name}", fingerprint(value)))
        self.facts = tuple(facts)

    def given(self, batch: dict[str, Any], tracer: ScalarTracer) -> inspect.BoundArguments:
        """The call with traced tensors and numbers."""
        arguments = dict(self._bound.arguments)
        arguments.update(batch)
        for name in arguments:
            if self._prefix + name in self.numbers:
                arguments[name] = tracer.counter(self._prefix + name)
        return inspect.BoundArguments(self._bound.signature, arguments)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class _Variable:
    """A variable outside of a function: a cell of its closure, or a global one."""

    name: str
    holder: Any

    def get(self) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(self.name, _MISSING)
        try:
            return self.holder.cell_contents
        except ValueError:  # not assigned yet
            return _MISSING

    def set(self, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.name] = value
        elif value is not _MISSING:
            self.holder.cell_contents = value


_MISSING = object()


def _forget(followed: WeakSet[FabricSteps], name: StepName) -> None:
    for steps in followed:
        steps.forget(name)


def _variables_of(function: types.FunctionType) -> list[_Variable]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = [_Variable(name, cell) for name, cell in cells]
    names = _global_names(function.__code__)
    return found + [_Variable(name, function.__globals__) for name in names if name in function.__globals__]


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global variables that code names, that of functions inside of it included."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _global_names(const)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))
